"""Regular expressions of JSON Schema, which match anywhere in a string, as expressions of the string's JSON text.

The grammar compiler knows neither anchors nor JSON's escapes. So an expression is parsed (by the standard library's
parser; what that reads unlike ECMA-262 is refused) and written anew.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

MAX_LEN = 2_000  # characters
MAX_POSITIONS = 2_000  # characters that an expression stands for, counted repetitions written out
UNBOUNDED = math.inf

_parser: Any = importlib.import_module("re._parser")

# What Python's parser takes and ECMA-262 reads otherwise, or not at all.
_FOREIGN = re.compile(r"(?:^|[^\\])(?:\\\\)*(?P<what>\[\]|\[\^\]|\(\?[PaiLmsux#-]|\\[AZaUN]|\{,)")
_NAMES = {
    "ASSERT": "a look-around",
    "ASSERT_NOT": "a look-around",
    "GROUPREF": "a back-reference",
    "POSSESSIVE_REPEAT": "a possessive repetition",
    "AT": r"\b, or ^ or $ elsewhere than at the ends",
}

Ranges = tuple[tuple[int, int], ...]  # code points, first and last; sorted, disjoint

ALL: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))
_SPACE: Ranges = (
    (0x9, 0xD), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
    (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
_CATEGORIES: dict[str, Ranges] = {
    "DIGIT": ((0x30, 0x39),),
    "WORD": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
    "SPACE": _SPACE,
}
_LINE_ENDS: Ranges = ((0xA, 0xA), (0xD, 0xD), (0x2028, 0x2029))
_ESCAPED: Ranges = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C))  # in JSON
_SHORT = {0x22: '"', 0x5C: r"\\", 0x8: "b", 0x9: "t", 0xA: "n", 0xC: "f", 0xD: "r"}


class UnsupportedPattern(Exception):
    pass


class Chars(NamedTuple):
    """One character of these."""

    ranges: Ranges


class Repeat(NamedTuple):
    item: Item
    least: int
    most: float


@dataclass(frozen=True, slots=True)
class Either:
    branches: tuple[Sequence[Item], ...]


Item = Chars | Repeat | Either
ANYTHING = Repeat(Chars(ALL), 0, UNBOUNDED)


@dataclass(frozen=True, slots=True)
class Pattern:
    """The strings that one of `branches` matches from end to end."""

    branches: tuple[Sequence[Item], ...] = ((ANYTHING,),)

    @classmethod
    def parse(cls, text: str, *, is_whole: bool = False) -> Pattern:
        """Read one that matches anywhere, or, with `is_whole`, only all of a text. Raises UnsupportedPattern."""
        pattern = cls(tuple(_anchored(branch, is_whole) for branch in _top_branches(_parsed(text))))
        if sum(_measured(branch).num_positions for branch in pattern.branches) > MAX_POSITIONS:
            raise UnsupportedPattern(f"the pattern stands for more than {MAX_POSITIONS} characters: repeat less")
        return pattern

    def of_length(self, least: int, most: float) -> Pattern:
        """Keep the strings of so many characters. Raises UnsupportedPattern where that is more than a repetition."""
        fitted = (_fitted(branch, least, most) for branch in self.branches)
        return Pattern(tuple(branch for branch in fitted if branch is not None))

    def json_text(self) -> str:
        """Return the expression of what stands between the quotes in JSON."""
        return _written_branches(self.branches, _json_char)

    def text(self) -> str:
        return _written_branches(self.branches, _char)


def _parsed(text: str) -> list[Any]:
    if len(text) > MAX_LEN:
        raise UnsupportedPattern(f"the pattern has more than {MAX_LEN} characters")
    if (found := _FOREIGN.search(text)) is not None:
        raise UnsupportedPattern(f"the pattern uses {found['what']}, which is not supported")
    try:
        return list(_parser.parse(text))
    except (re.error, OverflowError, RecursionError) as error:
        raise UnsupportedPattern(f"the pattern is not valid: {error}") from None


def _top_branches(items: list[Any]) -> list[list[Any]]:
    """The parser takes out what alternatives begin with: `^a$|^b$` is `^` and two branches."""
    if not items or str(items[-1][0]) != "BRANCH":
        return [items]
    return [[*items[:-1], *branch] for branch in items[-1][1][1]]


def _anchored(items: list[Any], is_whole: bool) -> list[Item]:
    starts = bool(items) and str(items[0][1]) == "AT_BEGINNING"
    ends = bool(items) and str(items[-1][1]) == "AT_END"
    inner = [_item(*pair) for pair in items[int(starts) : len(items) - ends]]
    if is_whole or (starts and ends):
        return inner
    if not inner:
        return [ANYTHING]
    return [*(() if starts else (ANYTHING,)), *inner, *(() if ends else (ANYTHING,))]


def _item(op: Any, value: Any) -> Item:
    match str(op):
        case "LITERAL" | "NOT_LITERAL" | "RANGE" | "CATEGORY" | "IN" | "ANY":
            return Chars(_ranges(op, value))
        case "MAX_REPEAT" | "MIN_REPEAT":
            least, most, items = value
            return Repeat(_group(items), least, UNBOUNDED if most == _parser.MAXREPEAT else most)
        case "BRANCH":
            return Either(tuple([_item(*pair) for pair in branch] for branch in value[1]))
        case "SUBPATTERN":
            return _group(value[3])
        case name:
            raise UnsupportedPattern(f"the pattern uses {_NAMES.get(name, 'syntax')}, which is not supported")


def _group(items: Any) -> Item:
    inner = [_item(*pair) for pair in items]
    return inner[0] if len(inner) == 1 else Either((inner,))


def _ranges(op: Any, value: Any) -> Ranges:
    match str(op):
        case "LITERAL":
            return ((value, value),)
        case "NOT_LITERAL":
            return _without(ALL, ((value, value),))
        case "RANGE":
            return (value,)
        case "CATEGORY":
            _, *negation, name = str(value).split("_")
            return _without(ALL, _CATEGORIES[name]) if negation else _CATEGORIES[name]
        case "ANY":
            return _without(ALL, _LINE_ENDS)
        case _:  # IN: a class
            is_negated = str(value[0][0]) == "NEGATE"
            ranges = _merged(range for pair in value[is_negated:] for range in _ranges(*pair))
            return _without(ALL, ranges) if is_negated else ranges


def _merged(ranges: Any) -> Ranges:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return tuple(merged)


def _without(ranges: Ranges, removed: Ranges) -> Ranges:
    for first, last in removed:
        kept: list[tuple[int, int]] = []
        for low, high in ranges:
            kept += [(low, min(high, first - 1)), (max(low, last + 1), high)]
        ranges = tuple((low, high) for low, high in dict.fromkeys(kept) if low <= high)
    return ranges


class _Measure(NamedTuple):
    least: float  # characters of the shortest match
    most: float
    num_positions: int


def _measured(items: Sequence[Item]) -> _Measure:
    least, most, positions = 0.0, 0.0, 0
    for item in items:
        match item:
            case Chars():
                one = _Measure(1, 1, 1)
            case Repeat(inner, few, many):
                each = _measured([inner])
                times = int(few if many == UNBOUNDED else many)
                longest = 0.0 if each.most == 0 else each.most * many
                one = _Measure(each.least * few, longest, each.num_positions * max(times, 1))
            case Either(branches):
                all = [_measured(branch) for branch in branches]
                one = _Measure(min(m.least for m in all), max(m.most for m in all), sum(m.num_positions for m in all))
        least, most, positions = least + one.least, most + one.most, positions + one.num_positions
    return _Measure(least, most, positions)


def _fitted(items: Sequence[Item], least: int, most: float) -> Sequence[Item] | None:
    """Bound the length of a sequence's matches; None = it has none of such a length."""
    whole = _measured(items)
    if whole.most < least or whole.least > most:
        return None
    if least <= whole.least and whole.most <= most:
        return items
    match [(i, item) for i, item in enumerate(items) if len(set(_measured([item])[:2])) > 1]:
        case [(i, Repeat(Chars() as chars, few, many))]:
            rest = int(whole.least) - few
            bounded = Repeat(chars, max(few, least - rest), min(many, most - rest))
            return [*items[:i], bounded, *items[i + 1 :]]
        case _:
            raise UnsupportedPattern("together with minLength or maxLength, and more than one part of it may vary")


Write = Callable[[Ranges], str]


def _written_branches(branches: Sequence[Sequence[Item]], write: Write) -> str:
    texts = list(dict.fromkeys("".join(_written(item, write) for item in branch) for branch in branches))
    filled = "|".join(text for text in texts if text)
    if "" in texts:
        return f"({filled})?" if filled else ""
    return filled if len(texts) == 1 else f"({filled})"


def _written(item: Item, write: Write) -> str:
    match item:
        case Chars(ranges):
            return write(ranges)
        case Either(branches):
            return _written_branches(branches, write)
        case Repeat(inner, least, most):
            text = _written(inner, write)
            times = {(0, UNBOUNDED): "*", (1, UNBOUNDED): "+", (0, 1): "?"}.get((least, most))
            if times is None:
                times = f"{{{least},}}" if most == UNBOUNDED else f"{{{least},{int(most)}}}"
            return f"{text if isinstance(inner, Chars) else f'({text})'}{times}" if text else ""


def _char(ranges: Ranges) -> str:
    if not ranges:
        raise UnsupportedPattern("the pattern has a class that no character is in")
    parts = [_letter(first) if first == last else f"{_letter(first)}-{_letter(last)}" for first, last in ranges]
    return f"[{''.join(parts)}]"


def _json_char(ranges: Ranges) -> str:
    """As JSON spells them: what must be escaped is, the rest is not."""
    plain = _without(ranges, _ESCAPED)
    codes = [code for first, last in _ESCAPED for code in range(first, last + 1) if _holds(ranges, code)]
    parts = [_char(plain)] if plain or not codes else []
    if short := "".join(_SHORT[code] for code in codes if code in _SHORT):
        parts.append(rf"\\[{short}]")
    for high in (0, 1):
        if low := "".join(f"{code % 16:x}" for code in codes if code not in _SHORT and code // 16 == high):
            parts.append(rf"\\u00{high}[{low}]")
    return parts[0] if len(parts) == 1 else f"({'|'.join(parts)})"


def _holds(ranges: Ranges, code: int) -> bool:
    return any(first <= code <= last for first, last in ranges)


def _letter(code: int) -> str:
    if code < 0x20:
        return f"\\x{code:02x}"
    return f"\\{chr(code)}" if chr(code) in "\\^-[]" else chr(code)
