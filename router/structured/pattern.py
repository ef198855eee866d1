"""Regular expressions of JSON Schema, which match anywhere in a string, as expressions that match all of it.

Only the syntax that the grammar compiler reads like ECMA-262 passes; the rest is refused.
"""

from __future__ import annotations

import re

ANCHORS = "^ and $ may stand only at the two ends, and not beside an alternative outside ( )"
MAX_LEN = 2_000  # characters
UNSUPPORTED = re.compile(
    r"(?:\\\\)*(?:(?P<look>\(\?<?[=!])|(?P<boundary>\\[bB])|(?P<back>\\[1-9k])|(?P<property>\\[pP]\{)|(?P<named>\(\?<))"
)
NAMES = {
    "look": "a look-around",
    "boundary": "a word boundary",
    "back": "a back-reference",
    "property": "a Unicode property",
    "named": "a named group",
}


class UnsupportedPattern(Exception):
    pass


def check_pattern(pattern: str) -> None:
    """Refuse what the compiler cannot honour, or what Python too calls no regular expression."""
    if len(pattern) > MAX_LEN:
        raise UnsupportedPattern(f"the pattern has more than {MAX_LEN} characters")
    if (found := UNSUPPORTED.search(pattern)) is not None:
        raise UnsupportedPattern(f"the pattern uses {NAMES[found.lastgroup or '']}, which is not supported")
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise UnsupportedPattern(f"the pattern is not valid: {error}") from None


def whole_pattern(pattern: str) -> str:
    """Return the expression for a whole output; anchors at its two ends say nothing."""
    check_pattern(pattern)
    starts, ends = pattern.startswith("^"), pattern.endswith("$") and not _is_escaped(pattern)
    inner = pattern[1 if starts else 0 : len(pattern) - ends]
    if has_anchor(inner) or (_has_choice(inner) and (starts or ends)):
        raise UnsupportedPattern(ANCHORS)
    return inner


def unanchored(pattern: str) -> str:
    check_pattern(pattern)
    starts, ends = pattern.startswith("^"), pattern.endswith("$") and not _is_escaped(pattern)
    inner = pattern[1 if starts else 0 : len(pattern) - ends]
    if has_anchor(inner) or (_has_choice(inner) and (starts or ends)):
        raise UnsupportedPattern(ANCHORS)
    grouped = f"({inner})" if _has_choice(inner) else inner
    return ("" if starts else r"[\s\S]*") + grouped + ("" if ends else r"[\s\S]*")


def _is_escaped(pattern: str) -> bool:
    """Whether the last character is escaped."""
    head = pattern[:-1]
    return (len(head) - len(head.rstrip("\\"))) % 2 == 1


def has_anchor(pattern: str) -> bool:
    return any(char in "^$" for char, _, in_class in _plain(pattern) if not in_class)


def _has_choice(pattern: str) -> bool:
    return any(char == "|" and depth == 0 for char, depth, in_class in _plain(pattern) if not in_class)


def _plain(pattern: str) -> list[tuple[str, int, bool]]:
    """Every unescaped character, with the groups around it and whether it is in a class (its brackets are)."""
    plain: list[tuple[str, int, bool]] = []
    depth, in_class, i = 0, False, 0
    while i < len(pattern):
        char = pattern[i]
        if char == "\\":
            i += 2
            continue
        was_in_class = in_class
        if in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = was_in_class = True
            if pattern[i + 1 : i + 2] == "^":
                i += 1
        elif char in "()":
            depth += 1 if char == "(" else -1
        plain.append((char, depth, was_in_class))
        i += 1
    return plain
