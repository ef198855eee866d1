"""How a family of models writes tool calls: a parser for what it says, and a grammar to make it say so."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from baton.router.parts import PartParser

Format = dict[str, Any]  # a format of xgrammar's structural tags


class Tool(NamedTuple):
    name: str
    parameters: dict[str, Any] | bool  # a lowered schema


class Dialect(Protocol):
    markers: tuple[str, ...]
    """Control tokens that the parser must see: they are shown to it as text."""

    def parser(self, *, forced: bool) -> PartParser:
        """Make a parser for one output; `forced` = it was made to consist of calls by `grammar`."""
        ...

    def grammar(self, tools: Sequence[Tool], *, forced: bool, parallel: bool) -> Format | None:
        """Constrain calls to the tools' schemas; None where only forced ones can be."""
        ...


def call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def json_format(schema: Mapping[str, Any] | bool) -> Format:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 4}


def call_tags(tools: Sequence[Tool], begin: str, arguments_key: str, end: str) -> list[Format]:
    """One tag a tool: `begin {"name": NAME, KEY: ARGUMENTS} end`."""
    return [
        {
            "type": "tag",
            "begin": f'{begin}{{"name": {json.dumps(tool.name)}, "{arguments_key}": ',
            "content": json_format(tool.parameters),
            "end": f"}}{end}",
        }
        for tool in tools
    ]


def separated(tags: list[Format], separator: str, *, parallel: bool) -> Format:
    """At least one call, and more only if they may run in parallel."""
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def triggered(tags: list[Format], trigger: str, *, parallel: bool) -> Format:
    return {"type": "triggered_tags", "triggers": [trigger], "tags": tags, "stop_after_first": not parallel}
