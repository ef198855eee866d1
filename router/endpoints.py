"""What differs between the endpoints that generate: the body they read and how they write the answer.

Each turns its own body into a ChatRequest or a CompletionRequest; between reading and writing all are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from pydantic import BaseModel

from baton.router.errors import RouterError
from baton.router.formats import ChatFormat, CompletionFormat, ReplyWriter
from baton.router.generation import Delta
from baton.router.openai_models import ChatRequest, CompletionRequest, Usage
from baton.router.tokenizer import Tokenizer

Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Reading(Generic[Body]):
    """One call's body, and what is generated for it."""

    body: Body
    core: ChatRequest | CompletionRequest
    model: str  # the name that replies give
    tokenizer: Tokenizer
    prompt_tokens: int


class Writer(Protocol):
    """Writes the reply to one call as one body."""

    def body(self, deltas: Sequence[Delta], usage: Usage, baton: dict[str, Any]) -> bytes: ...


class StreamWriter(Writer, Protocol):
    """Writes the reply as a body or as events."""

    def events(self, deltas: Sequence[Delta]) -> bytes: ...

    def last_events(self, usage: Usage, baton: dict[str, Any] | None) -> bytes:
        """End the stream well."""
        ...

    def error_event(self, error: RouterError) -> bytes:
        """Tell a failure after the stream has begun; nothing follows it."""
        ...


class Endpoint(Protocol[Body]):
    name: str
    body: type[Body]

    def core(self, body: Body) -> ChatRequest | CompletionRequest:
        """Raises InvalidRequest."""
        ...

    def writer(self, reading: Reading[Body]) -> Writer: ...

    def error(self, error: RouterError) -> dict[str, object]:
        """Return the body of an error before anything was sent."""
        ...


class Chat:
    name = "chat"
    body = ChatRequest

    def core(self, body: ChatRequest) -> ChatRequest:
        return body

    def writer(self, reading: Reading[ChatRequest]) -> Writer:
        return ReplyWriter(ChatFormat(reading.tokenizer), reading.model, include_usage=reading.core.include_usage)

    def error(self, error: RouterError) -> dict[str, object]:
        return error.body()


class Completions:
    name = "completions"
    body = CompletionRequest

    def core(self, body: CompletionRequest) -> CompletionRequest:
        return body

    def writer(self, reading: Reading[CompletionRequest]) -> Writer:
        return ReplyWriter(CompletionFormat(reading.tokenizer), reading.model, include_usage=reading.core.include_usage)

    def error(self, error: RouterError) -> dict[str, object]:
        return error.body()
