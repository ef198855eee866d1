"""Whether a lowered schema has a finite value: a tree whose every node must have a child has none."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

Lowered = dict[str, Any] | bool


def finite_definitions(definitions: Mapping[str, Lowered]) -> frozenset[str]:
    """Return the names of those that a finite value satisfies: the least fixed point."""
    finite: frozenset[str] = frozenset()
    while True:
        grown = frozenset(name for name, body in definitions.items() if is_finite(body, finite))
        if grown == finite:
            return finite
        finite = grown


def is_finite(schema: Lowered, finite: Set[str]) -> bool:
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2] in finite
    if "anyOf" in schema:
        return any(is_finite(branch, finite) for branch in schema["anyOf"])
    if schema.get("type") == "object":
        return all(_is_possible(name, schema, finite) for name in schema.get("required", ()))
    if schema.get("type") == "array":
        prefix: list[Lowered] = schema.get("prefixItems", [])
        num = schema.get("minItems", 0)
        return all(is_finite(item, finite) for item in prefix[:num]) and (
            num <= len(prefix) or is_finite(schema.get("items", True), finite)
        )
    return True


def _is_possible(name: str, schema: dict[str, Any], finite: Set[str]) -> bool:
    return is_finite(schema.get("properties", {}).get(name, schema.get("additionalProperties", True)), finite)
