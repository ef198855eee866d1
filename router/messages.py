"""/v1/messages: Anthropic's shape of a chat. Bodies become ChatRequests; answers are content blocks."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, FailFast, Field

from baton.router.endpoints import Reading, StreamWriter
from baton.router.errors import InvalidRequest, RouterError
from baton.router.formats import encode
from baton.router.generation import Delta
from baton.router.openai_models import (
    INT32_MAX,
    MAX_MESSAGES,
    ChatRequest,
    Int64,
    Priority,
    StopString,
    TokenId,
    Usage,
    parse_body,
)
from baton.router.segments import Begun, Grown, Segment, Segments, Step

Json = dict[str, Any]

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class Block(BaseModel):
    """A text, a tool's call or a tool's result; others are refused by name."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: str
    text: str = ""
    id: str = ""
    name: str = ""
    input: Json | None = None
    tool_use_id: str = ""
    content: str | list[Any] = ""


class Turn(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    role: Literal["user", "assistant"]
    content: str | list[Block]


class Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    name: str
    description: str | None = None
    input_schema: Json


class ToolChoice(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None


class MessagesRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    model: str
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)]
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES), FailFast()]
    system: str | list[Block] | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=4)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    # Extensions, as in /v1/chat/completions.
    seed: Int64 | None = None
    stop_token_ids: list[TokenId] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    priority: Priority | None = None


class Messages:
    name = "messages"
    body = MessagesRequest

    def core(self, body: MessagesRequest) -> ChatRequest:
        return parse_body(ChatRequest, encode(_chat(body)))

    def writer(self, reading: Reading[MessagesRequest]) -> StreamWriter:
        return MessageWriter(reading.model, reading.prompt_tokens)

    def error(self, error: RouterError) -> dict[str, object]:
        """Return Anthropic's shape of an error."""
        kind = ERROR_TYPES.get(error.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}


def _chat(body: MessagesRequest) -> Json:
    """Say the same as a chat completion's body does."""
    messages = [] if body.system is None else [{"role": "system", "content": _text(body.system, "system")}]
    for index, turn in enumerate(body.messages):
        messages += _turn(turn, f"messages.{index}.content")
    chat: Json = {"messages": messages, "stop": body.stop_sequences, "n": 1}
    same = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k", "seed", "stop_token_ids", "cache_salt")
    chat |= {name: getattr(body, name) for name in (*same, "priority")}
    if body.tools:
        functions = [_function(tool) for tool in body.tools]
        chat |= {"tools": [{"type": "function", "function": function} for function in functions]}
    if body.tool_choice is not None:
        choice = body.tool_choice
        by_name = {"type": "function", "function": {"name": choice.name}}
        chat["tool_choice"] = {"auto": "auto", "none": "none", "any": "required", "tool": by_name}[choice.type]
        chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if body.thinking is not None and body.thinking.budget_tokens is not None:
        chat["thinking_budget"] = body.thinking.budget_tokens
    return chat


def _function(tool: Tool) -> Json:
    return {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}


def _turn(turn: Turn, param: str) -> list[Json]:
    """Return one message, or several: tools' results are messages of their own in a chat."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    results = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block, param)}
        for block in turn.content
        if block.type == "tool_result"
    ]
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": json.dumps(block.input)}}
        for block in turn.content
        if block.type == "tool_use"
    ]
    said = [block for block in turn.content if block.type not in ("tool_result", "tool_use", "thinking")]
    if not (said or calls):
        return results
    message: Json = {"role": turn.role, "content": _text(said, param) if said else None}
    return [*results, message | ({"tool_calls": calls} if calls else {})]


def _text(content: str | list[Block], param: str) -> str:
    if isinstance(content, str):
        return content
    if any(block.type != "text" for block in content):
        raise InvalidRequest(f"{param}: this model reads text, tool_use and tool_result blocks only", param=param)
    return "".join(block.text for block in content)


def _result(block: Block, param: str) -> str:
    if isinstance(block.content, str):
        return block.content
    parts = [cast("Json", part) if isinstance(part, dict) else {} for part in block.content]
    if not all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
        raise InvalidRequest(f"{param}: a tool_result must be text", param=param)
    return "".join(part["text"] for part in parts)


class MessageWriter:
    def __init__(self, model: str, prompt_tokens: int) -> None:
        self._message: Json = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": prompt_tokens, "output_tokens": 0},
        }
        self._segments = Segments()
        self._end: Json = {}

    def events(self, deltas: Sequence[Delta]) -> bytes:
        events: list[Json] = []
        for delta in deltas:
            if delta.is_first:
                events.append({"type": "message_start", "message": self._message})
            events += [_block_event(step) for step in self._take(delta)]
        return b"".join(map(_event, events))

    def last_events(self, usage: Usage, baton: Json | None) -> bytes:
        end: Json = {"type": "message_delta", "delta": self._end, "usage": _usage(usage)}
        return _event(end | ({} if baton is None else {"baton": baton})) + _event({"type": "message_stop"})

    def error_event(self, error: RouterError) -> bytes:
        return _event(Messages().error(error))

    def body(self, deltas: Sequence[Delta], usage: Usage, baton: Json) -> bytes:
        for delta in deltas:
            self._take(delta)
        content = [_block(segment, is_whole=True) for segment in self._segments.all]
        return encode(self._message | {"content": content, "usage": _usage(usage), "baton": baton} | self._end)

    def _take(self, delta: Delta) -> list[Step]:
        steps = self._segments.push(delta.parts)
        if delta.finish is not None:
            steps += self._segments.end()
            reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(delta.finish, "end_turn")
            reason = reason if delta.stop_string is None else "stop_sequence"
            self._end = {"stop_reason": reason, "stop_sequence": delta.stop_string}
        return steps


def _block(segment: Segment, *, is_whole: bool) -> Json:
    if segment.kind == "call":
        arguments: object = _arguments(segment.text) if is_whole else {}
        return {"type": "tool_use", "id": segment.call_id, "name": segment.name, "input": arguments}
    text = segment.text if is_whole else ""
    if segment.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _arguments(text: str) -> object:
    """Parse a call's arguments; a call cut by the length has none that could be parsed, and says what it has."""
    try:
        return json.loads(text or "{}")
    except json.JSONDecodeError:
        return {"incomplete_json": text}


def _block_event(step: Step) -> Json:
    index = step.segment.index
    if isinstance(step, Begun):
        block = _block(step.segment, is_whole=False)
        return {"type": "content_block_start", "index": index, "content_block": block}
    if isinstance(step, Grown):
        kind, field = {
            "text": ("text_delta", "text"),
            "reasoning": ("thinking_delta", "thinking"),
            "call": ("input_json_delta", "partial_json"),
        }[step.segment.kind]
        return {"type": "content_block_delta", "index": index, "delta": {"type": kind, field: step.text}}
    return {"type": "content_block_stop", "index": index}


def _usage(usage: Usage) -> Json:
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }


def _event(data: Json) -> bytes:
    return b"event: " + data["type"].encode() + b"\ndata: " + encode(data) + b"\n\n"
