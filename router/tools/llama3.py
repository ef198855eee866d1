"""Llama 3: the output is {"name": ..., "parameters": {...}}, more of them after a semicolon."""

from __future__ import annotations

from collections.abc import Sequence

from baton.router.parts import CharParser, Content, Emit, PartParser
from baton.router.tools.dialect import Format, Tool, call_tags, separated, triggered
from baton.router.tools.json_call import JsonCall

PYTHON_TAG = "<|python_tag|>"


class Llama3:
    markers: tuple[str, ...] = ()  # <|python_tag|> says nothing that the brace does not

    def parser(self, *, forced: bool) -> PartParser:
        return JsonCalls("; \n\t")

    def grammar(self, tools: Sequence[Tool], *, forced: bool, parallel: bool) -> Format:
        tags = call_tags(tools, "", "parameters", "")
        if forced:
            return separated(tags, "; ", parallel=parallel)
        return triggered(tags, '{"name": "', parallel=parallel)


class JsonCalls(CharParser):
    """Calls one after the other, with nothing but `between` around them; from anything else on, all is content."""

    def __init__(self, between: str) -> None:
        self._between = between
        self._call: JsonCall | None = None
        self._num_calls = 0
        self._is_content = False
        self._held = ""

    def _feed(self, char: str, emit: Emit) -> None:
        if self._call is not None:
            self._call.feed(char, emit)
            if self._call.is_done:
                self._num_calls += self._call.is_call
                self._is_content = not self._call.is_call
                self._call = None
        elif self._is_content:
            emit(Content(char))
        elif char == "{":
            self._held = "" if self._num_calls else self._held
            self._emit_held(emit)
            self._call = JsonCall(self._num_calls)
            self._call.feed(char, emit)
        elif char in self._between:
            self._held += char
        else:
            self._is_content = True
            self._emit_held(emit)
            emit(Content(char))

    def _end(self, emit: Emit) -> None:
        if self._call is not None:
            self._call.finish(emit)
        elif not self._num_calls:
            self._emit_held(emit)

    def _emit_held(self, emit: Emit) -> None:
        if self._held:
            emit(Content(self._held))
            self._held = ""
