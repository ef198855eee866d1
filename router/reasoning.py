"""Thinking between <think> and </think>: told from the answer, and bounded by a budget of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

from baton.router.parts import CharParser, Emit, Part, PartParser, Reasoning, merged

OPEN, CLOSE = "<think>", "</think>"


class Thinking(Enum):
    """Where the prompt leaves the model."""

    NONE = auto()  # it does not think, or has been told not to
    MAY_OPEN = auto()  # the output may begin with <think>
    OPEN = auto()  # the prompt ends inside


def thinking_after(prompt: str, chat_template: str) -> Thinking:
    tail = prompt.rstrip()
    if CLOSE not in chat_template or tail.endswith(CLOSE):
        return Thinking.NONE
    return Thinking.OPEN if tail.endswith(OPEN) else Thinking.MAY_OPEN


def thinking_grammar(thinking: Thinking, budget: int | None, answer: dict[str, Any] | None) -> dict[str, Any] | None:
    """Put the thinking before the answer's grammar. `budget` is in tokens; None = unbounded."""
    if thinking is Thinking.NONE or (budget is None and answer is None):
        return answer
    limit = {} if budget is None else {"max_tokens": budget}
    inside: list[dict[str, Any]] = [
        {"type": "any_text", "excludes": [CLOSE], **limit},
        {"type": "const_string", "value": CLOSE},
    ]
    if answer is not None:
        inside.append({"type": "regex", "pattern": "\n{0,2}"})
    if thinking is Thinking.MAY_OPEN:
        thought = {"type": "sequence", "elements": [{"type": "const_string", "value": OPEN}, *inside]}
        inside = [{"type": "optional", "content": thought} if answer is not None else thought]
    return {"type": "sequence", "elements": [*inside, answer or {"type": "any_text"}]}


class ThinkParser(CharParser):
    """Passes what follows the thinking on to the answer's parser, without the empty lines between."""

    def __init__(self, thinking: Thinking, answer: PartParser) -> None:
        self._answer = answer
        self._is_inside = thinking is Thinking.OPEN
        self._at_start = True
        self._held = ""

    def push(self, text: str) -> Sequence[Part]:
        if not self._is_inside and not self._at_start:
            return self._answer.push(text)
        parts: list[Part] = []
        for i, char in enumerate(text):
            self._feed(char, parts.append)
            if not self._is_inside and not self._at_start:
                parts += self._answer.push(text[i + 1 :])
                break
        return merged(parts)

    def finish(self) -> Sequence[Part]:
        held, self._held = self._held, ""
        if self._is_inside:
            return [Reasoning(held)] if held else []
        return merged([*self._answer.push(held), *self._answer.finish()])

    def _feed(self, char: str, emit: Emit) -> None:
        self._held += char
        if self._is_inside:
            self._feed_inside(emit)
        elif self._held.lstrip() == OPEN:
            self._held, self._is_inside = "", True
        elif self._held.strip() and not OPEN.startswith(self._held.lstrip()):
            self._at_start = False
            for part in self._answer.push(self._held):
                emit(part)
            self._held = ""

    def _feed_inside(self, emit: Emit) -> None:
        if self._at_start and not self._held.strip():
            return  # empty lines before the first thought
        if self._at_start:
            self._held, self._at_start = self._held.lstrip(), False
        if self._held == CLOSE:
            self._held, self._is_inside, self._at_start = "", False, False
            self._answer = _Stripped(self._answer)
            return
        start = 0
        while not (CLOSE.startswith(self._held[start:]) or self._held[start:].isspace()):
            start += 1
        if start:
            emit(Reasoning(self._held[:start]))
            self._held = self._held[start:]


class _Stripped:
    """Drops white space before the answer."""

    def __init__(self, answer: PartParser) -> None:
        self._answer = answer
        self._has_begun = False

    def push(self, text: str) -> Sequence[Part]:
        if not self._has_begun:
            text = text.lstrip()
            self._has_begun = bool(text)
        return self._answer.push(text) if text else ()

    def finish(self) -> Sequence[Part]:
        return self._answer.finish()
