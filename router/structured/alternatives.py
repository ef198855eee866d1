"""A JSON Schema as alternatives: each a list of values, or one type with the keywords that apply to it.

The empty list of alternatives is the schema that nothing satisfies. Intersection is exact or refused, never a guess.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from baton.router.structured.pattern import Pattern, UnsupportedPattern

KEYWORDS: Mapping[str, tuple[str, ...]] = {
    "object": (
        "properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties",
    ),
    "array": ("prefixItems", "items", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "boolean": (),
    "null": (),
}  # fmt: skip
ANY_TYPES = ("object", "array", "string", "number", "boolean", "null")
MAX_ALTERNATIVES = 2_000
MAX_NUMBER = 2**53  # what doubles hold exactly
LARGER_WINS = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
SMALLER_WINS = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


class UnsupportedSchema(Exception):
    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"at {path}: {reason}")


class Node(NamedTuple):
    """A subschema and where it stands, as a JSON pointer."""

    schema: object
    path: str

    @property
    def is_object(self) -> bool:
        return isinstance(self.schema, dict)

    @property
    def keywords(self) -> dict[str, Any]:
        """Of a schema that is an object."""
        return cast("dict[str, Any]", self.schema)

    def keyword(self, key: str) -> Any:
        return self.keywords.get(key)

    def child(self, *keys: str | int) -> Node:
        schema: Any = self.schema
        for key in keys:
            schema = schema[key]
        return Node(schema, "/".join([self.path, *map(str, keys)]))


Conjunction = tuple[Node, ...]  # a value must satisfy all; never empty
ANYTHING: Conjunction = (Node(True, "#"),)


@dataclass(frozen=True, slots=True)
class Alternative:
    """Exactly `values`, or every value of `type` that the keywords allow. Subschemas in keywords are Conjunctions."""

    path: str
    type: str = ""
    keywords: Mapping[str, Any] = field(default_factory=dict[str, Any])
    values: Sequence[Any] | None = None


ANY = tuple(Alternative("#", type) for type in ANY_TYPES)


def json_key(value: object) -> str:
    """Equal for equal JSON values: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return "[" + ",".join(json_key(item) for item in cast("list[object]", value)) + "]"
    if isinstance(value, dict):
        items = sorted(cast("dict[str, object]", value).items())
        return "{" + ",".join(json.dumps(key) + ":" + json_key(item) for key, item in items) + "}"
    return json.dumps(value)


def type_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    names = {dict: "object", list: "array", str: "string", float: "number", type(None): "null"}
    return names[cast("type[Any]", type(value))]


def describe_type(type: str, node: Node) -> Alternative:
    """Read the keywords that apply to values of `type`."""
    schema = node.keywords
    keywords = {key: _read(key, node) for key in KEYWORDS[type] if key in schema}
    if type == "array" and isinstance(schema.get("items"), list):  # drafts 4 to 7
        keywords["prefixItems"] = [(node.child("items", i),) for i in range(len(schema["items"]))]
        del keywords["items"]
        if "additionalItems" in schema:
            keywords["items"] = (node.child("additionalItems"),)
    for bound, strict in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        is_draft4 = isinstance(keywords.get(strict), bool)
        if is_draft4 and keywords.pop(strict) and bound in keywords:
            keywords[strict] = keywords.pop(bound)
    if "multipleOf" in keywords:  # a whole number, hence so are its multiples
        type = "integer"
    return Alternative(node.path, type, keywords)


def _read(key: str, node: Node) -> Any:
    value: Any = node.keyword(key)
    path = f"{node.path}/{key}"
    if key in ("properties", "patternProperties"):
        _expect(isinstance(value, dict), path, "must be an object")
        is_pattern = key == "patternProperties"
        return {
            _pattern(name, path).json_text() if is_pattern else name: (node.child(key, name),)
            for name in cast("dict[str, Any]", value)
        }
    if key == "prefixItems" or (key == "items" and isinstance(value, list)):
        _expect(isinstance(value, list), path, "must be a list")
        return [(node.child(key, i),) for i in range(len(cast("list[Any]", value)))]
    if key in ("items", "additionalProperties"):
        return (node.child(key),)
    if key == "required":
        names: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [None]
        _expect(all(isinstance(name, str) for name in names), path, "must list strings")
        return list(dict.fromkeys(names))
    if key == "pattern":
        _expect(isinstance(value, str), path, "must be a string")
        return _pattern(value, path)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if key in COUNTS:
        _expect(is_number and value >= 0 and value == int(value), path, "must be a whole number, 0 or more")
        return int(value)
    is_draft4 = isinstance(value, bool) and key.startswith("exclusive")
    _expect(is_draft4 or (is_number and math.isfinite(value)), path, "must be a number")
    _expect(key != "multipleOf" or (value > 0 and value == int(value)), path, "must be a whole number above 0")
    _expect(abs(value) <= MAX_NUMBER, path, f"must be at most {MAX_NUMBER} in size")
    return value


def _pattern(text: str, path: str) -> Pattern:
    try:
        return Pattern.parse(text)
    except UnsupportedPattern as error:
        raise UnsupportedSchema(path, str(error)) from None


def _expect(holds: bool, path: str, reason: str) -> None:
    if not holds:
        raise UnsupportedSchema(path, reason)


def intersect(first: Sequence[Alternative], second: Sequence[Alternative], path: str) -> list[Alternative]:
    merged = [one for a in first for b in second if (one := _merged(a, b, path)) is not None]
    if len(merged) > MAX_ALTERNATIVES:
        raise UnsupportedSchema(path, f"combines to more than {MAX_ALTERNATIVES} alternatives")
    return merged


def _merged(a: Alternative, b: Alternative, path: str) -> Alternative | None:
    """What satisfies both; None if that is plain to see to be nothing."""
    if a.values is None and b.values is not None:
        a, b = b, a
    if a.values is not None:
        kept = [value for value in a.values if _is_among(value, b)]
        if kept and b.keywords:
            raise UnsupportedSchema(path, f"enum or const together with {', '.join(b.keywords)}")
        return Alternative(path, values=kept) if kept else None
    if a.type != b.type and {a.type, b.type} != {"integer", "number"}:
        return None
    type = "integer" if "integer" in (a.type, b.type) else a.type
    if not (a.keywords and b.keywords):
        return Alternative(a.path if a.keywords else b.path, type, a.keywords or b.keywords)
    keywords = {key: _both(key, a.keywords, b.keywords, path) for key in {**a.keywords, **b.keywords}}
    if type == "object":
        keywords |= _both_objects(a.keywords, b.keywords, path)
    if type == "array":
        keywords |= _both_arrays(a.keywords, b.keywords)
    return Alternative(path, type, keywords)


def _is_among(value: object, alternative: Alternative) -> bool:
    if alternative.values is not None:
        return json_key(value) in map(json_key, alternative.values)
    type = type_of(value)
    return type == alternative.type or (type == "integer" and alternative.type == "number")


def _both(key: str, a: Mapping[str, Any], b: Mapping[str, Any], path: str) -> Any:
    if key not in a or key not in b:
        return a[key] if key in a else b[key]
    if key in LARGER_WINS:
        return max(a[key], b[key])
    if key in SMALLER_WINS:
        return min(a[key], b[key])
    if key == "required":
        return list(dict.fromkeys(a[key] + b[key]))
    if key in ("pattern", "multipleOf") and a[key] != b[key]:
        raise UnsupportedSchema(path, f"two different values of {key} for one value")
    return a[key]  # what _both_objects and _both_arrays replace


def _both_objects(a: Mapping[str, Any], b: Mapping[str, Any], path: str) -> dict[str, Any]:
    keys = ("properties", "additionalProperties")
    if "patternProperties" in a or "patternProperties" in b:
        if any(key in one for key in (*keys, "patternProperties") for one in (a, b) if "patternProperties" not in one):
            raise UnsupportedSchema(path, "patternProperties combined with another schema's properties")
        if "patternProperties" in a and "patternProperties" in b:
            raise UnsupportedSchema(path, "patternProperties combined with another schema's patternProperties")
        return {}

    def rule(one: Mapping[str, Any], name: str) -> Conjunction:
        return one.get("properties", {}).get(name) or one.get("additionalProperties", ANYTHING)

    names = {**a.get("properties", {}), **b.get("properties", {})}
    return {
        "properties": {name: _conjunction(rule(a, name), rule(b, name)) for name in names},
        "additionalProperties": _conjunction(
            a.get("additionalProperties", ANYTHING), b.get("additionalProperties", ANYTHING)
        ),
    }


def _both_arrays(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    def rule(one: Mapping[str, Any], index: int) -> Conjunction:
        prefix = one.get("prefixItems", [])
        return prefix[index] if index < len(prefix) else one.get("items", ANYTHING)

    length = max(len(a.get("prefixItems", [])), len(b.get("prefixItems", [])))
    return {
        "prefixItems": [_conjunction(rule(a, i), rule(b, i)) for i in range(length)],
        "items": _conjunction(rule(a, length), rule(b, length)),
    }


def _conjunction(a: Conjunction, b: Conjunction) -> Conjunction:
    if a in (ANYTHING, b):
        return b
    return a if b == ANYTHING else (*a, *b)


def are_disjoint(a: Alternative, b: Alternative) -> bool:
    """Whether it is plain to see that no value satisfies both."""
    if a.values is None and b.values is not None:
        a, b = b, a
    if a.values is not None:
        return not any(_is_among(value, b) for value in a.values)
    if a.type != b.type and {a.type, b.type} != {"integer", "number"}:
        return True
    shared = set(a.keywords.get("required", ())) & set(b.keywords.get("required", ()))
    return any(_are_told_apart(_constants(a, name), _constants(b, name)) for name in shared)


def _constants(alternative: Alternative, name: str) -> set[str] | None:
    """The values that a property may have, if it says so itself by const or enum."""
    for node in alternative.keywords.get("properties", {}).get(name, ()):
        if node.is_object:
            if "const" in node.keywords:
                return {json_key(node.keyword("const"))}
            values = node.keyword("enum")
            if isinstance(values, list):
                return {json_key(value) for value in cast("list[Any]", values)}
    return None


def _are_told_apart(a: set[str] | None, b: set[str] | None) -> bool:
    return a is not None and b is not None and not a & b
