"""Mistral: [TOOL_CALLS] and then a JSON list of calls, or, in newer models, NAME[ARGS]{...} for each call."""

from __future__ import annotations

from collections.abc import Sequence

from baton.router.parts import CallArguments, CallStart, CharParser, Content, Emit, Marker, PartParser
from baton.router.tools.dialect import Format, Tool, call_id, call_tags, separated
from baton.router.tools.json_call import JsonCall

MARKER, ARGS = "[TOOL_CALLS]", "[ARGS]"


def json_list(tools: Sequence[Tool], *, parallel: bool) -> Format:
    calls = separated(call_tags(tools, "", "arguments", ""), ", ", parallel=parallel)
    ends = [{"type": "const_string", "value": bracket} for bracket in "[]"]
    return {"type": "sequence", "elements": [ends[0], calls, ends[1]]}


class Mistral:
    markers: tuple[str, ...] = (MARKER, ARGS)

    def parser(self, *, forced: bool) -> PartParser:
        return MistralParser(is_list=forced)

    def grammar(self, tools: Sequence[Tool], *, forced: bool, parallel: bool) -> Format | None:
        """A forced list has no marker: that is a control token, which grammars do not speak of."""
        return json_list(tools, parallel=parallel) if forced else None


class MistralParser(CharParser):
    def __init__(self, *, is_list: bool) -> None:
        self._marker = Marker(MARKER)
        self._is_text = not is_list
        self._call: JsonCall | _NamedCall | None = None
        self._num_calls = 0

    def _feed(self, char: str, emit: Emit) -> None:
        if self._call is not None:
            self._call.feed(char, emit)
            if self._call.is_done:
                self._num_calls += self._call.is_call
                self._call = None
        elif self._is_text:
            text, is_found = self._marker.feed(char)
            if text:
                emit(Content(text))
            self._is_text = not is_found
        elif char not in "[], \n\t":  # what stands between calls; of a next marker its bracket
            self._call = JsonCall(self._num_calls) if char == "{" else _NamedCall(self._num_calls)
            self._call.feed(char, emit)

    def _end(self, emit: Emit) -> None:
        if self._call is not None:
            self._call.finish(emit)
        elif self._is_text and self._marker.held:
            emit(Content(self._marker.flush()))


class _NamedCall:
    """NAME, perhaps [ARGS], then an object."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._name = ""
        self._depth = 0
        self._in_string = self._is_escaped = False
        self.is_call = False
        self.is_done = False

    def feed(self, char: str, emit: Emit) -> None:
        if not self.is_call and char != "{":
            self._name += char
            return
        if not self.is_call:
            self.is_call = True
            name = self._name.removeprefix(MARKER[1:]).removesuffix(ARGS).strip()
            emit(CallStart(self._index, call_id(), name))
        emit(CallArguments(self._index, char))
        if self._in_string:
            self._in_string = self._is_escaped or char != '"'
            self._is_escaped = not self._is_escaped and char == "\\"
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.is_done = self._depth == 0

    def finish(self, emit: Emit) -> None:
        if not self.is_call and self._name:
            emit(Content(self._name))
