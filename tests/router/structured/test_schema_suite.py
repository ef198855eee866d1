"""JSON-Schema-Test-Suite: for every schema that is not refused, the grammar accepts exactly the valid values.

A value is accepted if one of its spellings is: properties come in the schema's order, and integral numbers as integers.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import xgrammar

from baton.actors.engine.grammar import compile_grammar
from baton.router.structured.alternatives import KEYWORDS, UnsupportedSchema
from baton.router.structured.schema import ASSERTIONS, CHOICES, REFUSED, lower_schema
from baton.router.tools.dialect import json_format

DATA = Path(__file__).parents[2] / "data" / "json_schema_suite.jsonl.gz"
README = Path(__file__).parents[3] / "router" / "README.md"
BYTES = [bytes([byte]) for byte in range(1, 256)]


class Group(NamedTuple):
    file: str
    description: str
    schema: Any
    tests: list[dict[str, Any]]


@cache
def groups() -> list[Group]:
    with gzip.open(DATA, "rt") as lines:
        return [Group(**json.loads(line)) for line in lines]


@cache
def compiler() -> xgrammar.GrammarCompiler:
    info = xgrammar.TokenizerInfo(BYTES, xgrammar.VocabType.RAW, stop_token_ids=[])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False, enable_dynamic_compilation=True)


def compiled(schema: Any) -> xgrammar.CompiledGrammar:
    tag = {"type": "structural_tag", "format": json_format(lower_schema(schema))}
    return compile_grammar(compiler(), json.dumps(tag))


def accepts(grammar: xgrammar.CompiledGrammar, value: Any) -> bool:
    return any(accepts_text(grammar, spelled(order)) for order in islice(orders(canonical(value)), 200))


def accepts_text(grammar: xgrammar.CompiledGrammar, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
    return bool(matcher.accept_string(text)) and matcher.is_completed()


def spelled(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def canonical(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [canonical(item) for item in value]
    return {key: canonical(item) for key, item in value.items()} if isinstance(value, dict) else value


def orders(value: Any) -> Iterator[Any]:
    """Every order of every object's properties."""
    if isinstance(value, dict):
        for order in permutations(value):
            for items in product(*(list(islice(orders(value[key]), 24)) for key in order)):
                yield dict(zip(order, items, strict=True))
    elif isinstance(value, list):
        yield from (list(items) for items in product(*(list(islice(orders(item), 24)) for item in value)))
    else:
        yield value


def test_every_schema_is_honoured_exactly_or_refused(capfd: pytest.CaptureFixture[str]) -> None:
    wrong: list[str] = []
    kept: Counter[str] = Counter()
    for group in groups():
        try:
            grammar = compiled(group.schema)
        except UnsupportedSchema as refusal:
            assert str(refusal).startswith("at #"), group
            continue
        kept[group.file] += 1
        for test in group.tests:
            if accepts(grammar, test["data"]) != test["valid"]:
                wrong.append(f"{group.file}: {group.description}: {test['description']}")
    assert not wrong
    assert "Warning" not in capfd.readouterr().err  # the compiler took all of it literally
    assert sum(kept.values()) >= 186
    claimed = {key for keys in KEYWORDS.values() for key in keys}.difference(REFUSED, {"patternProperties"})
    for keyword in (*claimed, "type", "enum", "const", "anyOf", "allOf", "oneOf", "ref"):
        assert kept[f"{keyword}.json"], keyword


TEXTS = (
    *(
        "",
        "a",
        "ab",
        "abc",
        "aa",
        "b",
        "ba",
        "xa",
        "A",
        "AA",
        "-",
        "a-",
        "--",
        " ",
        "a b",
        "/x",
        "[]",
        "é",
        "漢",
        "😀",
        "😀😀",
    ),
    *('"', "\\", "\\n", 'a"b\\', 'x"y', "\n", "a\n", "\t", "\x01", "\x1f", "\x7f"),
)


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            "",
            "^$",
            "^$|^a$",
            "^a$|b",
            "^(a|b)$",
            "^a|^b",
            "a$|b$",
            "^(|a)$",
            "(?:ab)+c*?",
            "a{2,}",
            "^😀{2}$",
            "^\\u0041+$",
        ),
        *(
            'a"b\\\\',
            '"',
            "\\\\",
            '^[^"]*$',
            "^[^\\\\]*\\n$",
            "^[\\]\\[^\\\\-]+$",
            "^[^a]?$",
            "^\\/x$",
            "[\\s\\S]",
            "[^\\d\\w]",
        ),
        *("^[a-z][a-z0-9-]*$", ".", "^.+$", "\\S+", "^\\W{2}$", "^[\\u00e9-\\u00ff]$"),
    ],
)
def test_a_pattern_means_what_it_means_to_other_readers_of_the_schema(pattern: str) -> None:
    """As JSON text: what JSON must escape is escaped, and nothing else is."""
    grammar = compiled({"type": "string", "pattern": pattern})
    for text in TEXTS:
        matches = re.search(pattern.replace("$", r"\Z"), text, re.ASCII) is not None
        assert accepts_text(grammar, spelled(text)) == matches, text
    assert (
        not accepts_text(grammar, '"a"b"') and not accepts_text(grammar, '"\n"') and not accepts_text(grammar, '"\\"')
    )


def test_lengths_bound_a_pattern_that_varies_in_one_place() -> None:
    name = compiled({"type": "string", "pattern": "^[a-z][a-z0-9]*$", "minLength": 2, "maxLength": 4})
    assert [accepts(name, text) for text in ("a", "a1", "a123", "a1234", "1a")] == [False, True, True, False, False]
    assert accepts(compiled({"type": "string", "pattern": "^a?b?$", "maxLength": 9}), "ab")
    with pytest.raises(UnsupportedSchema, match="#: no finite value"):
        lower_schema({"type": "string", "pattern": "^a*$", "minLength": 3, "maxLength": 2})
    with pytest.raises(UnsupportedSchema, match="#: no finite value"):
        lower_schema({"type": "string", "pattern": "^a{5}$", "maxLength": 4})
    with pytest.raises(UnsupportedSchema, match="#/pattern: together with minLength or maxLength"):
        lower_schema({"type": "string", "pattern": "^a*b*$", "maxLength": 4})


def test_a_string_of_limited_length_is_json_and_escapes_only_without_a_maximum() -> None:
    assert accepts(compiled({"type": "string", "minLength": 2}), 'a"\n')
    for bounds in ({"maxLength": 4}, {"minLength": 17}):
        grammar = compiled({"type": "string", **bounds})
        text = "é" * bounds.get("minLength", 4)
        assert accepts(grammar, text) and not accepts(grammar, text[:-1] + '"')
        assert not accepts_text(grammar, f'"{text[:-1]}\t"') and not accepts_text(grammar, f'"{text[:-1]}\x01"')


def test_a_map_of_named_patterns_is_exact() -> None:
    """The suite's groups of patternProperties leave other names open, which is refused."""
    grammar = compiled({
        "type": "object", "patternProperties": {"^x-[a-z]+$": {"type": "integer"}}, "additionalProperties": False,
    })  # fmt: skip
    assert accepts(grammar, {}) and accepts(grammar, {"x-a": 1, "x-bc": 2})
    assert not accepts(grammar, {"y": 1}) and not accepts(grammar, {"x-a": "1"}) and not accepts(grammar, {"x-": 1})
    loose = compiled({"type": "object", "patternProperties": {"b": {"type": "null"}}, "additionalProperties": False})
    assert accepts(loose, {"abc": None}) and not accepts(loose, {"ac": None})


def test_the_table_names_every_keyword() -> None:
    rows = {
        keyword: cells[1].strip()
        for line in README.read_text().splitlines()
        if line.startswith("| `") and len(cells := line.strip("|").split("|")) >= 2
        for keyword in re.findall(r"`([$\w]+)`", cells[0])
    }
    assert all(rows[keyword].startswith("no") for keyword in REFUSED)
    assert all(rows[keyword].startswith("yes") for keyword in ASSERTIONS.difference(REFUSED))


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "stringg"}, "#/type"),
        ({"$ref": "#/nope"}, "#/$ref"),
        ({"type": "string", "pattern": "[a-"}, "#/pattern"),
        ({"type": "string", "pattern": "^(?!x)y$"}, "#/pattern"),
        ({"properties": {"a": {"not": {}}}}, "#/properties/a/not"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, "#"),
        ({"type": "array", "minItems": 3, "maxItems": 1}, "#"),
        ({"enum": []}, "#/enum"),
        ([], "#"),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}}, "#/$defs/A/$ref"),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}}, "#/$defs/B/$ref"),
        (
            {"$ref": "#/$defs/A", "$defs": {"A": {"type": "object", "required": ["a"],
             "properties": {"a": {"$ref": "#/$defs/A"}}}}},
            "#",
        ),
    ],
)  # fmt: skip
def test_what_is_refused_names_its_place(schema: Any, path: str) -> None:
    with pytest.raises(UnsupportedSchema) as refusal:
        lower_schema(schema)
    assert str(refusal.value).startswith(f"at {path}: ")


def test_deep_and_wide_schemas_end_in_bounded_time() -> None:
    deep: Any = {"type": "integer"}
    for _ in range(40):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"], "additionalProperties": False}
    value: Any = 7
    for _ in range(40):
        value = {"a": value}
    assert accepts(compiled(deep), value)
    for _ in range(60):
        deep = {"anyOf": [deep, {"items": deep}]}
    with pytest.raises(UnsupportedSchema, match="levels"):
        lower_schema(deep)


def test_a_tree_may_refer_to_itself() -> None:
    grammar = compiled({
        "$defs": {"N": {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/N"}}},
                        "additionalProperties": False}},
        "$ref": "#/$defs/N",
    })  # fmt: skip
    value: Any = {}
    for _ in range(5):
        value = {"kids": [value, {}]}
    assert accepts(grammar, value)
    assert not accepts(grammar, {"kids": [{"kid": []}]})


def test_a_bound_beyond_32_bits_is_kept() -> None:
    grammar = compiled({"type": "integer", "maximum": 20_000_000_000})
    assert accepts(grammar, 20_000_000_000) and not accepts(grammar, 20_000_000_001)


def test_enum_values_and_keys_are_written_as_they_are() -> None:
    values = ["开心", "😀", 'a"b', "tab\t", "", 1, "1", None, True]
    grammar = compiled({
        "type": "object", "properties": {"心情": {"enum": values}}, "required": ["心情"], "additionalProperties": False,
    })  # fmt: skip
    for value in values:
        assert accepts_text(grammar, spelled({"心情": value}))
    assert not accepts(grammar, {"心情": "2"}) and not accepts(grammar, {"心情": False})
    assert not accepts_text(grammar, '{"\\u5fc3\\u60c5": 1}')


def test_white_space_is_bounded_and_of_every_kind() -> None:
    grammar = compiled({"type": "object", "additionalProperties": {"type": "integer"}})
    assert accepts_text(grammar, '{\r\n\t "a" :\t1 }')
    assert not accepts_text(grammar, '{"a": 1,' + "\n" * 5 + '"b": 2}')


def test_choices_are_all_lowered_or_refused() -> None:
    assert CHOICES == ("anyOf", "oneOf")
    kinds = [{"type": "object", "required": ["k"], "properties": {"k": {"const": name}}} for name in "ab"]
    grammar = compiled({"oneOf": kinds})
    assert accepts(grammar, {"k": "a"}) and accepts(grammar, {"k": "b"}) and not accepts(grammar, {"k": "c"})
    with pytest.raises(UnsupportedSchema, match="#/oneOf: branches may overlap"):
        lower_schema({"oneOf": [{"type": "integer"}, {"type": "number"}]})
