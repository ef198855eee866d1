"""One call written as a JSON object, {"name": ..., "arguments": {...}}, read as it comes."""

from __future__ import annotations

import json
from typing import Any

from baton.router.parts import CallArguments, CallStart, Content, Emit
from baton.router.tools.dialect import call_id

ARGUMENT_KEYS = ("arguments", "parameters")


class JsonCall:
    """Feed it from the opening brace on. What turns out to be no call is given back as content, as it was written."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._raw = ""
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._key: str | None = None
        self._token = ""  # of the key or value at depth 1 that is being read
        self._name: str | None = None
        self._arguments = ""  # that came before the name
        self._has_arguments = False
        self.is_done = False

    @property
    def is_call(self) -> bool:
        return self._name is not None

    def feed(self, char: str, emit: Emit) -> None:
        self._raw += char if self._name is None else ""
        if self._in_string:
            self._in_string = self._is_escaped or char != '"'
            self._is_escaped = not self._is_escaped and char == "\\"
            self._take(char, emit)
        elif char == '"':
            self._in_string = True
            self._take(char, emit)
        elif char in "{[":
            self._depth += 1
            if self._depth > 1:
                self._take(char, emit)
        elif char in "}]":
            self._depth -= 1
            if self._depth:
                self._take(char, emit)
            else:
                self._end_value(emit)
                self.finish(emit)
        elif self._depth == 1 and char == ":" and self._key is None:
            self._key, self._token = _string(self._token), ""
        elif self._depth == 1 and char == ",":
            self._end_value(emit)
        else:
            self._take(char, emit)

    def finish(self, emit: Emit) -> None:
        """The object has ended, or the text has."""
        if self._name is None:
            emit(Content(self._raw))
        elif not self._has_arguments:
            emit(CallArguments(self._index, "{}"))
        self.is_done = True

    def _take(self, char: str, emit: Emit) -> None:
        if self._depth == 1 and not self._in_string and char.isspace():
            return
        is_arguments = self._key in ARGUMENT_KEYS and (self._token or char) == "{"
        if not is_arguments:
            self._token += char
            return
        self._token = "{"
        self._has_arguments = True
        if self._name is None:
            self._arguments += char
        else:
            emit(CallArguments(self._index, char))

    def _end_value(self, emit: Emit) -> None:
        if self._key == "name" and self._name is None and (name := _string(self._token)):
            self._name = name
            emit(CallStart(self._index, call_id(), name))
            if self._arguments:
                emit(CallArguments(self._index, self._arguments))
        self._key, self._token = None, ""


def _string(token: str) -> str:
    try:
        value: Any = json.loads(token)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
