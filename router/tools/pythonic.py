"""Calls in Python's syntax, as Llama 4 and others write them: [get_weather(city="Paris"), add(a=1, b=2)]."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from typing import Any

from baton.router.parts import CallArguments, CallStart, CharParser, Content, Emit, PartParser
from baton.router.tools.dialect import Format, Tool, call_id
from baton.router.tools.mistral import MistralParser, json_list

MAX_CALL_LEN = 65_536  # characters; Python's parser is recursive


class Pythonic:
    markers: tuple[str, ...] = ()

    def parser(self, *, forced: bool) -> PartParser:
        return MistralParser(is_list=True) if forced else PythonicParser()

    def grammar(self, tools: Sequence[Tool], *, forced: bool, parallel: bool) -> Format | None:
        """Schemas speak of JSON: forced calls are a JSON list, free ones are not constrained."""
        return json_list(tools, parallel=parallel) if forced else None


class PythonicParser(CharParser):
    """An output that begins with [ is calls, if its first entry is one; anything else is content."""

    def __init__(self) -> None:
        self._raw = ""  # since the last call
        self._call = ""
        self._depth = 0  # brackets of the call that is being read
        self._quote = ""
        self._is_escaped = False
        self._num_calls = 0
        self._is_content = self._has_ended = False

    def _feed(self, char: str, emit: Emit) -> None:
        if self._is_content:
            emit(Content(char))
            return
        self._raw += char
        if self._has_ended or (not self._raw.lstrip().startswith("[") and not self._num_calls):
            if not char.isspace():
                self._give_up(emit)
        elif self._call or char not in "[, \n\t]":
            self._feed_call(char, emit)
        elif char == "]":
            self._has_ended = True
            if not self._num_calls:
                self._give_up(emit)

    def _feed_call(self, char: str, emit: Emit) -> None:
        self._call += char
        if self._quote:
            if char == self._quote and not self._is_escaped:
                self._quote = ""
            self._is_escaped = char == "\\" and not self._is_escaped
        elif char in "\"'":
            self._quote = char
        elif char in "([{":
            self._depth += 1
        elif char in ")]}":
            self._depth -= 1
        if len(self._call) > MAX_CALL_LEN or self._depth < 0:
            self._give_up(emit)
        elif char == ")" and self._depth == 0 and not self._quote:
            self._take_call(emit)

    def _take_call(self, emit: Emit) -> None:
        try:
            name, arguments = _read_call(self._call.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            self._give_up(emit)
            return
        emit(CallStart(self._num_calls, call_id(), name))
        emit(CallArguments(self._num_calls, arguments))
        self._num_calls += 1
        self._raw = self._call = ""

    def _give_up(self, emit: Emit) -> None:
        self._is_content = True
        emit(Content(self._raw))

    def _end(self, emit: Emit) -> None:
        if not self._is_content and self._raw and not self._has_ended:
            emit(Content(self._raw))


def _read_call(text: str) -> tuple[str, str]:
    """Return name and arguments as JSON. Nothing is evaluated: arguments must be literals."""
    call = ast.parse(text, mode="eval").body
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("not a call with keyword arguments only")
    arguments: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError("** is not a keyword argument")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    return ast.unparse(call.func), json.dumps(arguments, ensure_ascii=False)
