"""Hermes, Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them in the text."""

from __future__ import annotations

from collections.abc import Sequence

from baton.router.parts import CharParser, Content, Emit, Marker, PartParser
from baton.router.tools.dialect import Format, Tool, call_tags, separated, triggered
from baton.router.tools.json_call import JsonCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes:
    markers: tuple[str, ...] = (OPEN, CLOSE)

    def parser(self, *, forced: bool) -> PartParser:
        return HermesParser()

    def grammar(self, tools: Sequence[Tool], *, forced: bool, parallel: bool) -> Format:
        tags = call_tags(tools, f"{OPEN}\n", "arguments", f"\n{CLOSE}")
        return separated(tags, "\n", parallel=parallel) if forced else triggered(tags, OPEN, parallel=parallel)


class HermesParser(CharParser):
    def __init__(self) -> None:
        self._marker = Marker(OPEN)
        self._is_inside = False
        self._call: JsonCall | None = None
        self._num_calls = 0
        self._space = ""  # after a call: dropped if another call or the end follows

    def _feed(self, char: str, emit: Emit) -> None:
        if self._call is not None:
            self._call.feed(char, emit)
            if self._call.is_done:
                self._num_calls += self._call.is_call
                self._call = None
        elif self._is_inside and char == "{":
            self._call = JsonCall(self._num_calls)
            self._call.feed(char, emit)
        else:
            text, is_found = self._marker.feed(char)
            if not self._is_inside:
                self._emit_text(text, emit)
            if is_found:
                self._is_inside = not self._is_inside
                self._space = ""
                self._marker = Marker(CLOSE if self._is_inside else OPEN)

    def _end(self, emit: Emit) -> None:
        if self._call is not None:
            self._call.finish(emit)
        elif not self._is_inside:
            self._emit_text(self._marker.flush(), emit)

    def _emit_text(self, text: str, emit: Emit) -> None:
        if self._num_calls:
            text, self._space = self._space + text, ""
            if not text.strip():
                self._space = text
                return
        if text:
            emit(Content(text))
