"""A choice's parts as newer APIs answer with them: texts, thoughts and calls, each begun, grown and ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from baton.router.parts import CallArguments, CallStart, Content, Part, Reasoning

Kind = Literal["text", "reasoning", "call"]


@dataclass(slots=True)
class Segment:
    index: int
    kind: Kind
    call_id: str = ""
    name: str = ""
    text: str = ""  # so far; of a call: its arguments, JSON


class Begun(NamedTuple):
    segment: Segment


class Grown(NamedTuple):
    segment: Segment
    text: str  # what is new


class Ended(NamedTuple):
    segment: Segment


Step = Begun | Grown | Ended


class Segments:
    def __init__(self) -> None:
        self.all: list[Segment] = []
        self._open: Segment | None = None

    def push(self, parts: Iterable[Part]) -> list[Step]:
        steps: list[Step] = []
        for part in parts:
            match part:
                case Content(text):
                    self._grow(self._of_kind("text", steps), text, steps)
                case Reasoning(text):
                    self._grow(self._of_kind("reasoning", steps), text, steps)
                case CallStart(_, id, name):
                    self._begin(Segment(len(self.all), "call", id, name), steps)
                case CallArguments(_, text):  # of the call begun last: they come one after another
                    assert self._open is not None and self._open.kind == "call"
                    self._grow(self._open, text, steps)
        return steps

    def end(self) -> list[Step]:
        steps: list[Step] = []
        self._close(steps)
        return steps

    def _of_kind(self, kind: Kind, steps: list[Step]) -> Segment:
        if self._open is not None and self._open.kind == kind:
            return self._open
        return self._begin(Segment(len(self.all), kind), steps)

    def _begin(self, segment: Segment, steps: list[Step]) -> Segment:
        self._close(steps)
        self._open = segment
        self.all.append(segment)
        steps.append(Begun(segment))
        return segment

    def _grow(self, segment: Segment, text: str, steps: list[Step]) -> None:
        segment.text += text
        steps.append(Grown(segment, text))

    def _close(self, steps: list[Step]) -> None:
        if self._open is not None:
            steps.append(Ended(self._open))
            self._open = None
