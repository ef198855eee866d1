"""OpenAI's request and response bodies, with every range that can be checked without knowing the model.

Requests are pydantic: strict types, null means default, and the one policy for unknown fields, of every endpoint: they
are ignored (so that no internal field can be set, and clients of other servers are served).
Responses are msgspec structs, since one is encoded for every streamed token.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PrivateAttr,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from baton.actors.engine.request import Pooling, PromptParams
from baton.router.errors import InvalidRequest
from baton.router.tool_models import MAX_TOOLS, ToolCall, ToolChoice, Tools

INT32_MAX = 2**31 - 1
MAX_STOP_LEN = 1024  # characters
MAX_PROMPTS = 256
MAX_MESSAGES = 4096

# Requests.

TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


def _stop_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LEN)]
Stops = Annotated[list[StopString], Field(max_length=4), BeforeValidator(_stop_list)]
Bias = Annotated[float, Field(ge=-100, le=100)]
MetadataValue = Annotated[str, Field(max_length=512)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Priority = Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class GenerationFields(BaseModel):
    """What chat and plain completions share."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    model: str
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: Int64 | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None  # -1 and 0 = off
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: dict[str, Bias] | None = None
    stop: Stops | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    priority: Priority | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    rank_by: Literal["mean_logprob", "votes"] | None = None  # the names of ranking.py's scorers
    response_format: Any = None  # read by structured/constraint.py, and so is the next
    structured_outputs: Any = None
    prompt_logprobs: Any = None
    user: str | None = None
    metadata: Annotated[dict[str, MetadataValue], Field(max_length=16)] | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationFields:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream: true", param="stream_options")
        if self.prompt_logprobs is not None:
            fix = "prompt_logprobs is not supported: ask /v1/completions for echo: true with logprobs"
            raise InvalidRequest(fix, param="prompt_logprobs")
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise InvalidRequest("best_of is less than n: raise it", param="best_of")
        if self.rank_by is not None and self.num_sampled == (self.n or 1):
            raise InvalidRequest("rank_by needs a best_of greater than n", param="rank_by")
        if self.stream and (self.best_of or 0) > (self.n or 1):
            raise InvalidRequest(
                "the best of several is known at the end: best_of > n needs stream: false", param="best_of"
            )
        return self

    @property
    def num_sampled(self) -> int:
        """Choices that are generated for each prompt; the best `n` of them are returned."""
        return self.best_of or self.n or 1


Fields = TypeVar("Fields", bound=BaseModel)


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


def _content_text(value: object) -> object:
    """Join text parts; leave anything else to the type check."""
    if not isinstance(value, list):
        return value
    try:
        return "".join(TextPart.model_validate(part).text for part in cast("list[object]", value))
    except ValidationError:
        raise ValueError('content parts must be {"type": "text", "text": string}; this model reads text only') from None


class Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_content_text)] = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None

    @model_validator(mode="after")
    def _only_assistants_may_say_nothing(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError("content is missing")
        return self


class ChatRequest(GenerationFields):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), FailFast()]
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    thinking_budget: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None  # tokens between the think tags
    thinking_waits: Annotated[int, Field(ge=0, le=8)] | None = None  # see budget_forcing.py
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = None

    @model_validator(mode="after")
    def _refuse_what_is_not_served(self) -> ChatRequest:
        refuse_if("functions", self.functions)
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        return self


def _prompt_list(value: Any) -> list[Any]:
    items: list[Any] = cast("list[Any]", value) if isinstance(value, list) and not _is_tokens(value) else [value]
    if not 1 <= len(items) <= MAX_PROMPTS or not all(isinstance(item, str) or _is_tokens(item) for item in items):
        raise ValueError(f"must be a string, a list of token ids, or a list of 1 to {MAX_PROMPTS} of these")
    return items


def _is_tokens(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    return all(type(item) is int and 0 <= item <= INT32_MAX for item in cast("list[Any]", value))


_TOKENS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": INT32_MAX}}
_PROMPT_SCHEMA = {"anyOf": [{"type": "string"}, _TOKENS_SCHEMA]}
Prompts = Annotated[
    list[Any],
    BeforeValidator(_prompt_list),
    WithJsonSchema(
        {
            "anyOf": [
                *_PROMPT_SCHEMA["anyOf"],
                {"type": "array", "items": _PROMPT_SCHEMA, "minItems": 1, "maxItems": MAX_PROMPTS},
            ]
        }
    ),
]


class CompletionRequest(GenerationFields):
    prompt: Prompts  # each a str or a list[int]
    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None  # 0: with echo, the prompt alone
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    suffix: Any = None
    _pooling: Pooling | None = PrivateAttr(None)  # set by the embeddings endpoint, never from outside

    @classmethod
    def pooled(cls, pooling: Pooling, **fields: Any) -> CompletionRequest:
        """Ask for each prompt's pooled hidden state."""
        request = cls(**fields, max_tokens=1, temperature=0.0)
        request._pooling = pooling
        return request

    @property
    def prompt_field(self) -> str:
        """What the client calls its prompts."""
        return "prompt" if self._pooling is None else "input"

    @property
    def prompt_params(self) -> PromptParams | None:
        """What is asked about the prompt's own tokens."""
        if self._pooling is not None:
            return PromptParams(pooling=self._pooling)
        return PromptParams(logprobs=self.logprobs) if self.echo and self.logprobs is not None else None

    @model_validator(mode="after")
    def _refuse_what_is_not_served(self) -> CompletionRequest:
        refuse_if("suffix", self.suffix)
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens is 0: ask for at least 1, or for echo: true", param="max_tokens")
        return self


def refuse_if(field: str, given: object) -> None:
    if given:
        raise InvalidRequest(f"{field} is not supported by this server: leave it out", param=field)


def parse_body(model: type[Fields], body: bytes) -> Fields:
    """Parse strictly. Raises InvalidRequest with the first fault, its field, and nothing of the body."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
        param = _field_name(fault["loc"])
        reason = fault["msg"].removeprefix("Value error, ")
        raise InvalidRequest(f"{param}: {reason}" if param else reason, param=param) from None


def _field_name(location: tuple[int | str, ...]) -> str | None:
    """Name the field without echoing keys that the client made up: they come after its own name."""
    depth = 3 if location[:1] == ("messages",) else 1
    names = [str(part) for part in location[:depth] if isinstance(part, int) or re.fullmatch(r"[a-z_]{1,40}", part)]
    return ".".join(names) or None


# Responses.


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int  # of every step up to the last one that had a part of a thought


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails(0)


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    bytes: list[int]
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]


class CompletionLogprobs(msgspec.Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float | None]  # null: of the echoed prompt's first token
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class FunctionText(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class ToolCallText(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call, or the part of one that a chunk adds; the index is a chunk's."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionText | None = None


class ChatText(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message, or the part of one that a chunk adds."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallText] | None = None


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: ChatText
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: ChatText
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


ReplyObject = Literal["chat.completion", "chat.completion.chunk", "text_completion"]
ReplyChoice = ChatChoice | ChatChunkChoice | CompletionChoice


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A body or a chunk of either endpoint. `usage` is null in chunks when the client asked for it at the end."""

    id: str
    object: ReplyObject
    created: int
    model: str
    choices: list[Any]  # of ReplyChoice: a union of structs that msgspec cannot tell apart, and here need not
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    baton: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
