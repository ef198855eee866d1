"""What a choice's text means: content, reasoning and tool calls.

A parser's parts depend on the text alone, not on how it was cut: so the body of a call is the streamed parts joined.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class Content(NamedTuple):
    text: str


class Reasoning(NamedTuple):
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    index: int  # among the answer's calls
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, which are JSON text."""

    index: int
    text: str


Part = Content | Reasoning | CallStart | CallArguments
Emit = Callable[[Part], None]


class PartParser(Protocol):
    def push(self, text: str) -> Sequence[Part]:
        """Take more text; return what is certain by now."""
        ...

    def finish(self) -> Sequence[Part]:
        """Return what was held back; nothing follows."""
        ...


class PlainText:
    """All text is content."""

    def push(self, text: str) -> Sequence[Part]:
        return (Content(text),) if text else ()

    def finish(self) -> Sequence[Part]:
        return ()


class CharParser(ABC):
    """Reads one character at a time, which makes its parts the same for every cut. Subclasses give `_feed`."""

    def push(self, text: str) -> Sequence[Part]:
        parts: list[Part] = []
        for char in text:
            self._feed(char, parts.append)
        return merged(parts)

    def finish(self) -> Sequence[Part]:
        parts: list[Part] = []
        self._end(parts.append)
        return merged(parts)

    @abstractmethod
    def _feed(self, char: str, emit: Emit) -> None: ...

    def _end(self, emit: Emit) -> None:  # noqa: B027
        """Emit what was held back; by default nothing was."""


class Marker:
    """Finds a fixed string in text that comes by characters; holds back only what may become it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.held = ""

    def feed(self, char: str) -> tuple[str, bool]:
        """Return the text that is certainly not the marker's, and whether the marker is complete."""
        held = self.held + char
        if held == self._text:
            self.held = ""
            return "", True
        start = 0
        while not self._text.startswith(held[start:]):
            start += 1
        self.held = held[start:]
        return held[:start], False

    def flush(self) -> str:
        held, self.held = self.held, ""
        return held


def merged(parts: Iterable[Part]) -> list[Part]:
    """Join neighbours of one kind."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + part.text)
        elif isinstance(part, CallArguments) and isinstance(last, CallArguments) and part.index == last.index:
            joined[-1] = CallArguments(part.index, last.text + part.text)
        else:
            joined.append(part)
    return joined


@dataclass(slots=True)
class Call:
    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """All parts of a choice, joined."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list[Call])


def join_parts(parts: Iterable[Part]) -> Answer:
    answer = Answer()
    for part in parts:
        match part:
            case Content(text):
                answer.content += text
            case Reasoning(text):
                answer.reasoning += text
            case CallStart(_, id, name):
                answer.calls.append(Call(id, name))
            case CallArguments(index, text):
                answer.calls[index].arguments += text
    return answer
