"""Token ids of one choice to text, as they come: no half characters, no part of a stop string.

Works on the tokens' bytes, so its state is at most three bytes and the possible beginning of a stop string. How the
tokens were grouped into steps never changes the text.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

_utf8 = codecs.getincrementaldecoder("utf-8")


class Released(NamedTuple):
    """`text` may be sent now. `num_tokens` of the tokens given were used; `stop_string`, if any, ended the rest."""

    text: str
    num_tokens: int
    stop_string: str | None


class Detokenizer:
    def __init__(
        self,
        token_bytes: Mapping[int, bytes],
        special_ids: Collection[int],
        *,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> None:
        self._token_bytes = token_bytes
        self._special_ids = special_ids
        self._characters = _utf8("replace")
        self._stop = StopMatcher(stops) if stops else None
        self._min_tokens = min_tokens
        self.num_tokens = 0

    def push(self, tokens: Sequence[int], *, hidden_tail: int = 0, last: bool = False) -> Released:
        """Take a step's tokens. The last `hidden_tail` of them yield no text (a stop token); `last` flushes."""
        parts: list[str] = []
        visible = len(tokens) - hidden_tail
        for i, token in enumerate(tokens):
            self.num_tokens += 1
            if i >= visible or token in self._special_ids:
                continue
            text, stop_string = self._match(self._characters.decode(self._token_bytes[token]))
            parts.append(text)
            if stop_string is not None:
                return Released("".join(parts), i + 1, stop_string)
        if last:
            text, stop_string = self._match(self._characters.decode(b"", final=True))
            parts.append(text)
            if stop_string is not None:
                return Released("".join(parts), len(tokens), stop_string)
            if self._stop is not None:
                parts.append(self._stop.flush())
        return Released("".join(parts), len(tokens), None)

    def _match(self, text: str) -> StopMatch:
        if self._stop is None or self.num_tokens < self._min_tokens:
            return StopMatch(text, None)
        return self._stop.push(text)


class StopMatch(NamedTuple):
    text: str  # safe to send
    stop_string: str | None  # that is complete now


class StopMatcher:
    """Finds the stop string that completes first (of several at once, the longest), whatever the cuts of the text.

    One Knuth-Morris-Pratt automaton a stop string: its state is how many characters of the string the text ends
    with, so the longest state is exactly what must be held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._fallbacks = [_fallback(stop) for stop in stops]
        self._states = [0] * len(self._stops)
        self._held = ""

    def push(self, text: str) -> StopMatch:
        pending = self._held + text
        for i, char in enumerate(text, start=len(self._held) + 1):
            if (matched := self._advance(char)) is not None:
                self._held = ""
                return StopMatch(pending[: i - len(matched)], matched)
        keep = max(self._states)
        self._held = pending[len(pending) - keep :]
        return StopMatch(pending[: len(pending) - keep], None)

    def flush(self) -> str:
        """Return the held text: no stop string completed it."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held

    def _advance(self, char: str) -> str | None:
        """Feed one character; return the longest stop string it completes."""
        matched = None
        for i, (stop, fallback) in enumerate(zip(self._stops, self._fallbacks, strict=True)):
            state = self._states[i]
            while state and stop[state] != char:
                state = fallback[state]
            state += stop[state] == char
            self._states[i] = state
            if state == len(stop) and (matched is None or len(stop) > len(matched)):
                matched = stop
        return matched


def _fallback(stop: str) -> list[int]:
    """Return, for each length of a matched prefix, the longest shorter prefix that the same text also ends with."""
    table = [0] * (len(stop) + 1)
    state = 0
    for i in range(1, len(stop)):
        while state and stop[i] != stop[state]:
            state = table[state]
        state += stop[i] == stop[state]
        table[i + 1] = state
    return table
