"""What a body asks its output to match, as a format of xgrammar's structural tags.

Everything that can be told here without compiling is refused here, with its field; the worker tells the rest.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, cast

from baton.router.errors import InvalidRequest
from baton.router.structured.alternatives import UnsupportedSchema
from baton.router.structured.finite import Lowered
from baton.router.structured.pattern import Pattern, UnsupportedPattern
from baton.router.structured.schema import lower_schema
from baton.router.tools.dialect import Format, json_format

MAX_TEXT_LEN = 65_536  # characters of a schema, an expression or a grammar
MAX_CHOICES = 1_000
KINDS = ("json", "json_object", "regex", "choice", "grammar")


def asked_format(response_format: Any, structured_outputs: Any) -> Format | None:
    """Read whichever of the two fields is given; None = anything goes. Raises InvalidRequest."""
    first = _of_response_format(response_format)
    second = _of_structured_outputs(structured_outputs)
    if first is not None and second is not None:
        raise InvalidRequest("give response_format or structured_outputs, not both", param="structured_outputs")
    return first or second


def lower(schema: Any, param: str) -> Lowered:
    """Raises InvalidRequest that names the field, and the path in the schema."""
    try:
        text = json.dumps(schema)
        if len(text) > MAX_TEXT_LEN:
            raise InvalidRequest(f"{param} has more than {MAX_TEXT_LEN} characters: simplify the schema", param=param)
        return _lowered(text)
    except RecursionError:
        raise InvalidRequest(f"{param} is nested too deep: simplify the schema", param=param) from None
    except UnsupportedSchema as error:
        raise InvalidRequest(f"{param} {error}", param=param) from None


@lru_cache(maxsize=256)
def _lowered(text: str) -> Lowered:
    return lower_schema(json.loads(text))


def _of_response_format(given: Any) -> Format | None:
    kind = _get(given, "type", "response_format")
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return json_format({"type": "object", "additionalProperties": True})
    if kind == "json_schema":
        schema = _get(given.get("json_schema"), "schema", "response_format.json_schema")
        if schema is not None:
            return json_format(lower(schema, "response_format.json_schema.schema"))
        raise InvalidRequest("response_format.json_schema.schema is missing", param="response_format")
    raise InvalidRequest(
        "response_format.type must be text, json_object or json_schema; structured_outputs has more kinds",
        param="response_format",
    )


def _of_structured_outputs(given: Any) -> Format | None:
    if given is None:
        return None
    asked = [kind for kind in KINDS if _get(given, kind, "structured_outputs") not in (None, False)]
    if len(asked) != 1:
        raise InvalidRequest(f"structured_outputs takes exactly one of {', '.join(KINDS)}", param="structured_outputs")
    return _of_kind(asked[0], given[asked[0]])


def _of_kind(kind: str, value: Any) -> Format:
    param = f"structured_outputs.{kind}"
    if kind == "json":
        return json_format(lower(_parsed(value, param) if isinstance(value, str) else value, param))
    if kind == "json_object":
        return json_format({"type": "object", "additionalProperties": True})
    if kind == "choice":
        return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in _choices(value, param)]}
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT_LEN:
        raise InvalidRequest(f"{param} must be a string of 1 to {MAX_TEXT_LEN} characters", param=param)
    if kind == "grammar":
        return {"type": "grammar", "grammar": value}
    try:
        return {"type": "regex", "pattern": Pattern.parse(value, is_whole=True).text()}
    except UnsupportedPattern as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from None


def _choices(value: Any, param: str) -> list[str]:
    choices = cast("list[Any]", value) if isinstance(value, list) else []
    if not 0 < len(choices) <= MAX_CHOICES or not all(isinstance(choice, str) and choice for choice in choices):
        raise InvalidRequest(f"{param} must list 1 to {MAX_CHOICES} strings, none of them empty", param=param)
    if sum(map(len, choices)) > MAX_TEXT_LEN:
        raise InvalidRequest(f"{param} has more than {MAX_TEXT_LEN} characters", param=param)
    return choices


def _parsed(text: str, param: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{param} is not valid JSON", param=param) from None


def _get(given: Any, key: str, param: str) -> Any:
    if given is None:
        return None
    if not isinstance(given, dict):
        raise InvalidRequest(f"{param} must be an object", param=param)
    return cast("dict[str, Any]", given).get(key)
