"""/v1/responses: text and tools in, items out; stateless, so that nothing is stored and nothing can be referred to."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator

from baton.router.endpoints import Reading, StreamWriter
from baton.router.errors import InvalidRequest, RouterError
from baton.router.formats import encode
from baton.router.generation import Delta
from baton.router.openai_models import (
    INT32_MAX,
    MAX_MESSAGES,
    ChatRequest,
    Int64,
    MetadataValue,
    Priority,
    Usage,
    parse_body,
    refuse_if,
)
from baton.router.segments import Begun, Grown, Segment, Segments, Step

Json = dict[str, Any]

CHAT_NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text"}
TEXT_PARTS = ("input_text", "output_text", "text")


class Item(BaseModel):
    """A message, a call, or a call's output."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: str = ""
    content: str | list[Json] = ""
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str | list[Json] = ""


def _or_text(schema: Json) -> None:
    """Tell OpenAPI that a string will do."""
    items = dict(schema)
    schema.clear()
    schema["anyOf"] = [{"type": "string"}, items]


def _item_list(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Items = Annotated[
    list[Item],
    Field(min_length=1, max_length=MAX_MESSAGES, json_schema_extra=_or_text),
    FailFast(),
    BeforeValidator(_item_list),
]


class TextOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    format: Json | None = None


class ReasoningOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    effort: str | None = None


class ResponsesRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    model: str
    input: Items
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: Annotated[dict[str, MetadataValue], Field(max_length=16)] | None = None
    user: str | None = None
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    # Extensions, as in /v1/chat/completions.
    seed: Int64 | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    priority: Priority | None = None

    @model_validator(mode="after")
    def _refuse_what_needs_a_store(self) -> ResponsesRequest:
        refuse_if("previous_response_id", self.previous_response_id)
        refuse_if("conversation", self.conversation)
        refuse_if("background", self.background)
        return self


class Responses:
    name = "responses"
    body = ResponsesRequest

    def core(self, body: ResponsesRequest) -> ChatRequest:
        return parse_body(ChatRequest, encode(_chat(body)))

    def writer(self, reading: Reading[ResponsesRequest]) -> StreamWriter:
        return ResponseWriter(reading.model, reading.body)

    def error(self, error: RouterError) -> dict[str, object]:
        """Say what is called so here, not in a chat's body."""
        if error.param is None:
            return error.body()
        head, *rest = error.param.split(".")
        param = ".".join([CHAT_NAMES.get(head, head), *rest])
        said = {"message": error.message.replace(error.param, param), "param": param}
        return {"error": {**cast(Json, error.body()["error"]), **said}}


def _chat(body: ResponsesRequest) -> Json:
    """Say the same as a chat completion's body does."""
    messages: list[Json] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    for index, item in enumerate(body.input):
        _add_item(messages, item, f"input.{index}")
    same = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "metadata", "user", "seed", "top_k")
    chat: Json = {name: getattr(body, name) for name in (*same, "min_p", "cache_salt", "priority")}
    chat |= {"messages": messages, "max_completion_tokens": body.max_output_tokens}
    if body.tools:
        chat["tools"] = [_tool(tool, index) for index, tool in enumerate(body.tools)]
    choice = body.tool_choice
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    chat["tool_choice"] = choice
    if body.reasoning is not None and body.reasoning.effort is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    format = body.text.format if body.text is not None else None
    if format is not None and format.get("type") == "json_schema":
        format = {"type": "json_schema", "json_schema": {key: value for key, value in format.items() if key != "type"}}
    chat["response_format"] = format
    return chat


def _tool(tool: Json, index: int) -> Json:
    if tool.get("type") != "function":
        raise InvalidRequest(f"tools.{index}: only function tools are served here", param=f"tools.{index}")
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _add_item(messages: list[Json], item: Item, param: str) -> None:
    if item.type == "message":
        messages.append({"role": item.role, "content": _text(item.content, param)})
    elif item.type == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output, param)})
    elif item.type == "function_call":
        call = {
            "id": item.call_id,
            "type": "function",
            "function": {"name": item.name, "arguments": item.arguments},
        }
        if messages and messages[-1]["role"] == "assistant":  # one turn may say something and call several times
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})


def _text(content: str | list[Json], param: str) -> str:
    if isinstance(content, str):
        return content
    if not all(part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str) for part in content):
        raise InvalidRequest(f"{param}: content parts must be texts; this model reads nothing else", param=param)
    return "".join(cast(str, part["text"]) for part in content)


class ResponseWriter:
    def __init__(self, model: str, body: ResponsesRequest) -> None:
        self._response: Json = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
        }
        self._segments = Segments()
        self._finish: str | None = None
        self._num_events = 0

    def events(self, deltas: Sequence[Delta]) -> bytes:
        events: list[Json] = []
        for delta in deltas:
            if delta.is_first:
                events += [
                    {"type": f"response.{name}", "response": self._response} for name in ("created", "in_progress")
                ]
            for step in self._take(delta):
                events += self._step_events(step)
        return b"".join(map(self._event, events))

    def last_events(self, usage: Usage, baton: Json | None) -> bytes:
        response = self._whole(usage) | ({} if baton is None else {"baton": baton})
        return self._event({"type": f"response.{response['status']}", "response": response})

    def error_event(self, error: RouterError) -> bytes:
        failure = {"code": error.code, "message": error.message}
        failed = self._response | {"status": "failed", "error": failure, "output": self._output()}
        told = self._event({"type": "error", **failure, "param": error.param})
        return told + self._event({"type": "response.failed", "response": failed})

    def body(self, deltas: Sequence[Delta], usage: Usage, baton: Json) -> bytes:
        for delta in deltas:
            self._take(delta)
        return encode(self._whole(usage) | {"baton": baton})

    def _take(self, delta: Delta) -> list[Step]:
        steps = self._segments.push(delta.parts)
        if delta.finish is not None:
            self._finish = delta.finish
            steps += self._segments.end()
        return steps

    def _whole(self, usage: Usage) -> Json:
        is_cut = self._finish == "length"
        return self._response | {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output(),
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.completion_tokens_details.reasoning_tokens},
                "total_tokens": usage.total_tokens,
            },
        }

    def _output(self) -> list[Json]:
        return [self._item(segment, is_whole=True) for segment in self._segments.all]

    def _item_id(self, segment: Segment) -> str:
        prefix = {"text": "msg", "reasoning": "rs", "call": "fc"}[segment.kind]
        return f"{prefix}_{self._response['id'].removeprefix('resp_')}_{segment.index}"

    def _item(self, segment: Segment, *, is_whole: bool) -> Json:
        item: Json = {"id": self._item_id(segment), "status": "completed" if is_whole else "in_progress"}
        if segment.kind == "call":
            arguments = segment.text if is_whole else ""
            called = {"call_id": segment.call_id, "name": segment.name, "arguments": arguments}
            return item | {"type": "function_call"} | called
        content = [_content(segment, segment.text)] if is_whole else []
        if segment.kind == "reasoning":
            return item | {"type": "reasoning", "summary": [], "content": content}
        return item | {"type": "message", "role": "assistant", "content": content}

    def _step_events(self, step: Step) -> list[Json]:
        segment = step.segment
        place: Json = {"item_id": self._item_id(segment), "output_index": segment.index}
        if segment.kind != "call":
            place["content_index"] = 0
        kind = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}[segment.kind]
        if isinstance(step, Grown):
            more = {"type": f"response.{kind}.delta", **place, "delta": step.text}
            return [more | ({"logprobs": []} if segment.kind == "text" else {})]
        is_begun = isinstance(step, Begun)
        item = self._item(segment, is_whole=not is_begun)
        of_item = {
            "type": f"response.output_item.{'added' if is_begun else 'done'}",
            "output_index": segment.index,
            "item": item,
        }
        if segment.kind == "call":
            done = {"type": f"response.{kind}.done", **place, "name": segment.name, "arguments": segment.text}
            return [of_item] if is_begun else [done, of_item]
        part = _content(segment, "" if is_begun else segment.text)
        if is_begun:
            return [of_item, {"type": "response.content_part.added", **place, "part": part}]
        done = {"type": f"response.{kind}.done", **place, "text": segment.text}
        done |= {"logprobs": []} if segment.kind == "text" else {}
        return [done, {"type": "response.content_part.done", **place, "part": part}, of_item]

    def _event(self, data: Json) -> bytes:
        numbered = data | {"sequence_number": self._num_events}
        self._num_events += 1
        return b"event: " + data["type"].encode() + b"\ndata: " + encode(numbered) + b"\n\n"


def _content(segment: Segment, text: str) -> Json:
    if segment.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
