"""JSON Schema (2020-12, and what drafts 4 to 7 spell otherwise) to the subset that the grammar compiler reads exactly.

A schema is a set of values. `lower_schema` writes it as alternatives of one type each, with only those keywords that
the compiler honours to the letter (`alternatives.KEYWORDS`); whatever else would constrain a value is refused with its
path, and so is a schema that no finite value satisfies. README.md has the table for users.
"""

from __future__ import annotations

import re
from itertools import combinations
from typing import Any, cast
from urllib.parse import unquote

from baton.router.structured.alternatives import (
    ANY,
    ANY_TYPES,
    KEYWORDS,
    Alternative,
    Conjunction,
    Node,
    UnsupportedSchema,
    are_disjoint,
    describe_type,
    intersect,
)
from baton.router.structured.finite import Lowered, finite_definitions, is_finite
from baton.router.structured.pattern import UNBOUNDED, Pattern, UnsupportedPattern

MAX_DEPTH = 64  # nested subschemas
MAX_NODES = 20_000  # subschemas written
MAX_COUNTED = 16  # characters of a minLength that the grammar counts one by one
NEEDS_ESCAPE = re.compile(r'["\\\x00-\x1f]')

CHOICES = ("anyOf", "oneOf")
# They constrain values and are not honoured. Any other unknown keyword is an annotation, as the standard has it.
REFUSED = (
    "$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired", "dependentSchemas", "if", "not",
    "propertyNames", "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
)  # fmt: skip
ASSERTIONS = {"$ref", "allOf", "anyOf", "oneOf", "type", "enum", "const", *REFUSED}.union(*KEYWORDS.values())


def lower_schema(schema: object) -> Lowered:
    """Return an equivalent schema of the subset. Raises UnsupportedSchema, which names the path."""
    return _Lowering(schema).run()


class _Lowering:
    def __init__(self, root: object) -> None:
        self._root = root
        self._names: dict[str, str] = {}  # of definitions, by the $ref's pointer
        self._pending: list[tuple[str, Node]] = []  # definitions to be written
        self._num_nodes = 0

    def run(self) -> Lowered:
        lowered = self._write((Node(self._root, "#"),), 0)
        definitions: dict[str, Lowered] = {}
        while self._pending:
            name, node = self._pending.pop()
            definitions[name] = self._write((node,), 0)
        finite = finite_definitions(definitions)
        if not is_finite(lowered, finite):
            raise UnsupportedSchema("#", "no finite value can satisfy the schema")
        if isinstance(lowered, bool) or not definitions:
            return lowered
        return lowered | {"$defs": definitions}

    def _write(self, conjunction: Conjunction, depth: int) -> Lowered:
        first = conjunction[0]
        self._num_nodes += 1
        if depth > MAX_DEPTH or self._num_nodes > MAX_NODES:
            raise UnsupportedSchema(first.path, f"the schema has more than {MAX_DEPTH} levels or {MAX_NODES} parts")
        if len(conjunction) == 1 and first.is_object:
            asserted = [key for key in first.keywords if key in ASSERTIONS]
            if asserted == ["$ref"]:
                return {"$ref": f"#/$defs/{self._definition(first)}"}
            if len(asserted) == 1 and asserted[0] in CHOICES:
                self._alternatives(first, ())  # which checks what the branches lead to
                return _union([self._write((branch,), depth + 1) for branch in _branches(first, asserted[0])])
        alternatives = list(ANY)
        for node in conjunction:
            alternatives = intersect(alternatives, self._alternatives(node, ()), node.path)
        if {one.type for one in alternatives if not one.keywords and one.values is None} >= set(ANY_TYPES):
            return True
        return _union([self._write_one(alternative, depth) for alternative in alternatives])

    def _definition(self, node: Node) -> str:
        """Name the target of a $ref; it is written once, however often it is referred to."""
        target = self._resolve(node)
        if target.path not in self._names:
            self._alternatives(target, (target.path,))  # refuses what leads back to itself
            self._names[target.path] = f"d{len(self._names)}"
            self._pending.append((self._names[target.path], target))
        return self._names[target.path]

    def _write_one(self, alternative: Alternative, depth: int) -> Lowered:
        if alternative.values is not None:
            return {"enum": list(alternative.values)}
        written: dict[str, Any] = {"type": alternative.type}
        for key, value in alternative.keywords.items():
            if isinstance(value, tuple):
                written[key] = self._write(cast(Conjunction, value), depth + 1)
            elif isinstance(value, dict):
                items = cast("dict[str, Conjunction]", value).items()
                written[key] = {name: self._write(item, depth + 1) for name, item in items}
            elif key == "prefixItems":
                written[key] = [self._write(item, depth + 1) for item in value]
            else:
                written[key] = value
        if alternative.type == "object":
            return _checked_object(written, alternative.path)
        if alternative.type == "string":
            return _checked_string(written, alternative.path)
        return _checked_array(written) if alternative.type == "array" else _checked_number(written)

    def _alternatives(self, node: Node, refs: tuple[str, ...]) -> list[Alternative]:
        """Read one schema. `refs` are the references that led here without a step into the value."""
        if isinstance(node.schema, bool):
            return list(ANY) if node.schema else []
        schema = _checked_schema(node)
        alternatives = [describe_type(type, node) for type in _types(schema, node.path)]
        for key in ("enum", "const"):
            if key in schema:
                values = [Alternative(node.path, values=_values(schema, key, node.path))]
                alternatives = intersect(alternatives, values, f"{node.path}/{key}")
        if "$ref" in schema:
            target = self._resolve(node)
            if target.path in refs:
                raise UnsupportedSchema(f"{node.path}/$ref", "the reference leads back to itself")
            alternatives = intersect(alternatives, self._alternatives(target, (*refs, target.path)), node.path)
        if "allOf" in schema:
            for branch in _branches(node, "allOf"):
                alternatives = intersect(alternatives, self._alternatives(branch, refs), branch.path)
        for key in CHOICES:
            if key in schema:
                alternatives = intersect(alternatives, self._choice(node, key, refs), f"{node.path}/{key}")
        return alternatives

    def _choice(self, node: Node, key: str, refs: tuple[str, ...]) -> list[Alternative]:
        """`oneOf` is a union only if no value satisfies two of its branches."""
        branches = [self._alternatives(branch, refs) for branch in _branches(node, key)]
        if key == "oneOf":
            for one, other in combinations(branches, 2):
                if not all(are_disjoint(a, b) for a in one for b in other):
                    raise UnsupportedSchema(
                        f"{node.path}/oneOf",
                        "branches may overlap; use anyOf, or tell them apart by type or by the const of a property "
                        "that all of them require",
                    )
        return [alternative for branch in branches for alternative in branch]

    def _resolve(self, node: Node) -> Node:
        pointer: Any = node.keyword("$ref")
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise UnsupportedSchema(f"{node.path}/$ref", 'only references inside the schema, "#/...", are supported')
        target = Node(self._root, "#")
        for part in pointer.split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            key = int(name) if isinstance(target.schema, list) and name.isdecimal() else name
            try:
                target = target.child(key)
            except (KeyError, IndexError, TypeError):
                raise UnsupportedSchema(f"{node.path}/$ref", "the reference's target does not exist") from None
        return target


def _checked_schema(node: Node) -> dict[str, Any]:
    if not node.is_object:
        raise UnsupportedSchema(node.path, "a schema must be an object, true or false")
    schema = node.keywords
    for key in REFUSED:
        if key in schema and not (key == "uniqueItems" and schema[key] is False):
            raise UnsupportedSchema(f"{node.path}/{key}", f"the keyword {key} is not supported")
    if isinstance(schema.get("$id"), str) and node.path != "#":
        raise UnsupportedSchema(f"{node.path}/$id", "a schema inside the schema with an $id of its own")
    return schema


def _types(schema: dict[str, Any], path: str) -> list[str]:
    given: Any = schema.get("type", list(ANY_TYPES))
    types: list[Any] = cast("list[Any]", given) if isinstance(given, list) else [given]
    for type in types:
        if not isinstance(type, str) or type not in KEYWORDS:
            raise UnsupportedSchema(f"{path}/type", f"a type must be one of {', '.join(KEYWORDS)}")
    return [type for type in dict.fromkeys(types) if type != "integer" or "number" not in types]


def _values(schema: dict[str, Any], key: str, path: str) -> list[Any]:
    if key == "const":
        return [schema["const"]]
    values: Any = schema["enum"]
    if not isinstance(values, list) or not values:
        raise UnsupportedSchema(f"{path}/enum", "must be a list with at least one value")
    return cast("list[Any]", values)


def _branches(node: Node, key: str) -> list[Node]:
    branches: Any = node.keyword(key)
    if not isinstance(branches, list) or not branches:
        raise UnsupportedSchema(f"{node.path}/{key}", "must be a list with at least one schema")
    return [node.child(key, i) for i in range(len(cast("list[Any]", branches)))]


def _union(branches: list[Lowered]) -> Lowered:
    if any(branch is True for branch in branches):
        return True
    possible = [branch for branch in branches if branch is not False]
    if not possible:
        return False
    return possible[0] if len(possible) == 1 else {"anyOf": possible}


def _checked_object(written: dict[str, Any], path: str) -> Lowered:
    """Say what the compiler would assume otherwise; False for what is impossible."""
    properties: dict[str, Lowered] = written.get("properties", {})
    rest = written.setdefault("additionalProperties", True)
    required: list[str] = written.get("required", [])
    for name in required:
        if properties.get(name, True if "patternProperties" in written else rest) is False:
            return False
    if "maxProperties" in written and written["maxProperties"] < max(written.get("minProperties", 0), len(required)):
        return False
    banned = [name for name, schema in properties.items() if schema is False]
    if banned and rest is not False:
        raise UnsupportedSchema(
            f"{path}/properties", "a property that is not allowed needs additionalProperties: false"
        )
    named = {name: schema for name, schema in properties.items() if schema is not False}
    named |= {name: rest for name in required if name not in named}
    if "patternProperties" in written:
        _check_map(written, named, path)
    if rest is not False and any(NEEDS_ESCAPE.search(name) for name in named):
        raise UnsupportedSchema(f"{path}/properties", "a name that JSON must escape needs additionalProperties: false")
    written["properties"] = named
    return written


def _check_map(written: dict[str, Any], named: dict[str, Lowered], path: str) -> None:
    """Patterns of names are exact only where each name has one rule."""
    patterns: dict[str, Lowered] = written["patternProperties"]
    if len(patterns) > 1 or False in patterns.values() or named or written["additionalProperties"] is not False:
        raise UnsupportedSchema(
            f"{path}/patternProperties", "needs a single pattern, additionalProperties: false, and no properties"
        )


def _checked_array(written: dict[str, Any]) -> Lowered:
    prefix: list[Lowered] = written.get("prefixItems", [])
    rest = written.setdefault("items", True)
    limit = next((i for i, item in enumerate(prefix) if item is False), len(prefix) if rest is False else None)
    if limit is not None:
        written["maxItems"] = min(limit, written.get("maxItems", limit))
    if written.get("minItems", 0) > written.get("maxItems", float("inf")):
        return False
    if prefix:  # the compiler takes no `true` here
        written["prefixItems"] = [{} if item is True else item for item in prefix[: written.get("maxItems")]]
    return written


def _checked_string(written: dict[str, Any], path: str) -> Lowered:
    """Write lengths into the pattern. Without one they are the compiler's, which then escapes no characters."""
    pattern: Pattern | None = written.pop("pattern", None)
    least, most = written.get("minLength", 0), written.get("maxLength", UNBOUNDED)
    if least > most:
        return False
    if pattern is None:
        if not 0 < least <= MAX_COUNTED or most != UNBOUNDED:
            return written
        pattern = Pattern()
    try:
        fitted = pattern.of_length(least, most)
        text = fitted.json_text()
    except UnsupportedPattern as error:
        raise UnsupportedSchema(f"{path}/pattern", str(error)) from None
    if not fitted.branches:
        return False
    return {"type": "string", "pattern": text} if text else {"enum": [""]}


def _checked_number(written: dict[str, Any]) -> Lowered:
    lowest = max(written.get(key, float("-inf")) for key in ("minimum", "exclusiveMinimum"))
    highest = min(written.get(key, float("inf")) for key in ("maximum", "exclusiveMaximum"))
    is_open = lowest == written.get("exclusiveMinimum") or highest == written.get("exclusiveMaximum")
    return False if lowest > highest or (lowest == highest and is_open) else written
