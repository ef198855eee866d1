"""Deltas to OpenAI's bodies and server-sent events, for either endpoint."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from baton.actors.engine.request import TokenLogprobs
from baton.router.errors import RouterError
from baton.router.generation import Delta, ScoredToken
from baton.router.openai_models import (
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    ChatText,
    CompletionChoice,
    CompletionLogprobs,
    FunctionText,
    Reply,
    ReplyChoice,
    ReplyObject,
    TokenLogprob,
    ToolCallText,
    TopLogprob,
    Usage,
)
from baton.router.parts import CallArguments, CallStart, Content, Part, Reasoning, join_parts
from baton.router.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
LOWEST_LOGPROB = -9999.0  # JSON has no -inf; OpenAI's own stand-in

encode = msgspec.json.Encoder().encode


class Format(Protocol):
    """What differs between the endpoints."""

    id_prefix: str
    object: ReplyObject
    chunk_object: ReplyObject

    def chunk_choices(self, delta: Delta) -> Sequence[ReplyChoice]:
        """Return the chunks that tell one delta, in order."""
        ...

    def choice(self, index: int, deltas: Sequence[Delta]) -> ReplyChoice:
        """Return what all deltas of one choice come to."""
        ...


class ReplyWriter:
    """Writes the reply to one call, either as one body or as events."""

    def __init__(self, format: Format, model: str, *, include_usage: bool) -> None:
        self._format = format
        self._id = f"{format.id_prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._include_usage = include_usage
        self._no_usage: msgspec.UnsetType | None = None if include_usage else msgspec.UNSET

    def events(self, deltas: Sequence[Delta]) -> bytes:
        chunks = [choice for delta in deltas for choice in self._format.chunk_choices(delta)]
        return b"".join(_event(self._chunk([choice], self._no_usage)) for choice in chunks)

    def last_events(self, usage: Usage, baton: dict[str, Any] | None) -> bytes:
        """End the stream well: one chunk with no choices if there is something to say, and the terminal marker."""
        if not self._include_usage and baton is None:
            return DONE
        last = self._chunk([], usage if self._include_usage else msgspec.UNSET)
        return _event(msgspec.structs.replace(last, baton=baton or msgspec.UNSET)) + DONE

    def error_event(self, error: RouterError) -> bytes:
        return b"data: " + encode(error.body()) + b"\n\n"

    def body(self, deltas: Sequence[Delta], usage: Usage, baton: dict[str, Any]) -> bytes:
        """Join all deltas of the call into one body."""
        by_index: dict[int, list[Delta]] = {}
        for delta in deltas:
            by_index.setdefault(delta.index, []).append(delta)
        choices = [self._format.choice(index, parts) for index, parts in sorted(by_index.items())]
        reply = Reply(
            id=self._id,
            object=self._format.object,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            baton=baton,
        )
        return encode(reply)

    def _chunk(self, choices: list[ReplyChoice], usage: Usage | msgspec.UnsetType | None) -> Reply:
        return Reply(
            id=self._id,
            object=self._format.chunk_object,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
        )


class ChatFormat:
    id_prefix = "chatcmpl"
    object: ReplyObject = "chat.completion"
    chunk_object: ReplyObject = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def chunk_choices(self, delta: Delta) -> list[ChatChunkChoice]:
        chunks: list[ChatChunkChoice] = []
        if delta.is_first:
            chunks.append(ChatChunkChoice(delta.index, ChatText("assistant", ""), None, None))
        texts = [_chunk_text(part) for part in delta.parts]
        if delta.scored and not texts:
            texts.append(ChatText(content=""))
        logprobs = self._logprobs(delta.scored)
        for text in texts:
            chunks.append(ChatChunkChoice(delta.index, text, logprobs, None))
            logprobs = None  # told once
        if delta.finish is not None:
            chunks.append(ChatChunkChoice(delta.index, ChatText(), None, delta.finish))
        return chunks

    def choice(self, index: int, deltas: Sequence[Delta]) -> ChatChoice:
        answer = join_parts(part for delta in deltas for part in delta.parts)
        calls = [
            ToolCallText(None, call.id, "function", FunctionText(call.name, call.arguments)) for call in answer.calls
        ]
        content = None if calls and not answer.content else answer.content
        message = ChatText("assistant", content, answer.reasoning or None, calls or None)
        return ChatChoice(index, message, self._logprobs(_scored(deltas)), deltas[-1].finish)

    def _logprobs(self, scored: Sequence[ScoredToken]) -> ChatLogprobs | None:
        return ChatLogprobs([self._token(token) for token in scored]) if scored else None

    def _token(self, scored: ScoredToken) -> TokenLogprob:
        assert scored.logprobs is not None, "a chat's prompt is not echoed"
        alternatives = _alternatives(scored.logprobs, self._tokenizer)
        top = [TopLogprob(*self._spelling(id), logprob) for id, logprob in alternatives.items()]
        return TokenLogprob(*self._spelling(scored.id), _finite(scored.logprobs.chosen), top)

    def _spelling(self, id: int) -> tuple[str, list[int]]:
        data = self._tokenizer.token_bytes[id]
        return data.decode(errors="replace"), list(data)


class CompletionFormat:
    id_prefix = "cmpl"
    object: ReplyObject = "text_completion"
    chunk_object: ReplyObject = "text_completion"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def chunk_choices(self, delta: Delta) -> list[CompletionChoice]:
        if not (delta.text or delta.scored or delta.finish):
            return []
        return [CompletionChoice(delta.index, delta.text, self._logprobs(delta.scored), delta.finish)]

    def choice(self, index: int, deltas: Sequence[Delta]) -> CompletionChoice:
        text = "".join(delta.text for delta in deltas)
        return CompletionChoice(index, text, self._logprobs(_scored(deltas)), deltas[-1].finish)

    def _logprobs(self, scored: Sequence[ScoredToken]) -> CompletionLogprobs | None:
        if not scored:
            return None
        return CompletionLogprobs(
            tokens=[self._spelling(token.id) for token in scored],
            token_logprobs=[token.logprobs and _finite(token.logprobs.chosen) for token in scored],
            top_logprobs=[self._top(token.logprobs) for token in scored],
            text_offset=[token.offset for token in scored],
        )

    def _top(self, logprobs: TokenLogprobs | None) -> dict[str, float] | None:
        if logprobs is None:
            return None
        return {self._spelling(id): logprob for id, logprob in _alternatives(logprobs, self._tokenizer).items()}

    def _spelling(self, id: int) -> str:
        """Spell a token that is not whole characters as OpenAI does, so that such tokens stay distinct."""
        data = self._tokenizer.token_bytes[id]
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _chunk_text(part: Part) -> ChatText:
    match part:
        case Content(text):
            return ChatText(content=text)
        case Reasoning(text):
            return ChatText(reasoning_content=text)
        case CallStart(index, id, name):
            return ChatText(tool_calls=[ToolCallText(index, id, "function", FunctionText(name, ""))])
        case CallArguments(index, text):
            return ChatText(tool_calls=[ToolCallText(index, function=FunctionText(arguments=text))])


def _scored(deltas: Sequence[Delta]) -> list[ScoredToken]:
    return [token for delta in deltas for token in delta.scored]


def _event(reply: Reply) -> bytes:
    return b"data: " + encode(reply) + b"\n\n"


def _alternatives(logprobs: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, float]:
    """Return id -> log-probability; rows that pad the model's vocabulary have no text and are left out."""
    pairs = zip(logprobs.top_ids, logprobs.top, strict=True)
    return {id: _finite(logprob) for id, logprob in pairs if id < tokenizer.vocab_size}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
