"""From a validated body to what is to be generated: tokenised prompts, one Request per choice, and how to answer."""

from __future__ import annotations

import asyncio
import json
import math
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from baton.actors.engine.request import Request
from baton.router.budget_forcing import GO_ON, STRAIGHT, BudgetForcing, Source
from baton.router.errors import InvalidRequest
from baton.router.generation import Echo, Manner
from baton.router.openai_models import ChatRequest, CompletionRequest, Message
from baton.router.ranking import SCORERS, Scorer
from baton.router.reasoning import CLOSE, Thinking, thinking_after
from baton.router.sampling import ModelLimits, check_prompt, choice_seed, sampling_params
from baton.router.speech import Speech, chat_speech, completion_speech, offered_tools
from baton.router.tokenizer import Tokenizer
from baton.router.tool_models import ToolCall

TAIL = 16  # tokens of a rendered prompt that tell whether it ends inside a thought


@dataclass(frozen=True, slots=True)
class Plan:
    """`requests` has `num_choices` entries for each prompt, in order; `echo` is what each of them starts with."""

    body: ChatRequest | CompletionRequest
    requests: Sequence[Request]
    num_choices: int
    echo: Sequence[Echo | None]
    manner: Manner

    @property
    def num_kept(self) -> int:
        """Of each prompt's choices."""
        return self.body.n or 1

    @property
    def scorer(self) -> Scorer:
        return SCORERS[self.body.rank_by or "mean_logprob"]


async def plan_chat(body: ChatRequest, tokenizer: Tokenizer, limits: ModelLimits, deadline_s: float) -> Plan:
    tools = offered_tools(body)
    tokens = await tokenizer.encode_chat(
        [for_template(message) for message in body.messages],
        [tool.model_dump(exclude_none=True) for tool in tools],
        body.chat_template_kwargs or {},
        context=limits.context,
    )
    thinking = thinking_after(tokenizer.decode(tokens[-TAIL:]), tokenizer.chat_template)
    speech = await _speech(body, partial(chat_speech, body, tokenizer.dialect, thinking))
    requests = _requests(body, tokens, "messages", limits, (deadline_s, speech.grammar))
    source = token_source(body, thinking, tokenizer)
    manner = Manner(speech.make_parser, tokenizer.ids_of(speech.markers), bool(body.logprobs), source)
    return Plan(body, requests, len(requests), [None] * len(requests), manner)


async def _speech(body: ChatRequest | CompletionRequest, make: Callable[[], Speech]) -> Speech:
    """A large schema takes tens of milliseconds to read: not on the loop."""
    has_schema = bool(body.response_format or body.structured_outputs or (isinstance(body, ChatRequest) and body.tools))
    return await asyncio.to_thread(make) if has_schema else make()


async def _encoded(prompt: str | Sequence[int], tokenizer: Tokenizer, context: int) -> tuple[int, ...]:
    return await tokenizer.encode_prompt(prompt, context=context) if isinstance(prompt, str) else tuple(prompt)


async def plan_completion(
    body: CompletionRequest, tokenizer: Tokenizer, limits: ModelLimits, deadline_s: float
) -> Plan:
    num_choices = body.num_sampled
    speech = await _speech(body, partial(completion_speech, body))
    if num_choices * len(body.prompt) > 1024:
        raise InvalidRequest(
            f"{len(body.prompt)} prompts times n = {num_choices} is more than 1024: send fewer", param="n"
        )
    requests: list[Request] = []
    echo: list[Echo | None] = []
    for prompt in body.prompt:
        tokens = await _encoded(prompt, tokenizer, limits.context)
        requests += _requests(body, tokens, body.prompt_field, limits, (deadline_s, speech.grammar))
        text = prompt if isinstance(prompt, str) else tokenizer.decode(tokens)
        echo += [Echo(text, is_all=body.max_tokens == 0) if body.echo else None] * num_choices
    return Plan(body, requests, num_choices, echo, Manner(tells_logprobs=body.logprobs is not None))


def _requests(
    body: ChatRequest | CompletionRequest,
    tokens: tuple[int, ...],
    param: str,
    limits: ModelLimits,
    terms: tuple[float, str],
) -> list[Request]:
    """Make one request per choice of one prompt: they differ in id and seed only, and share the tokens' tuple."""
    deadline_s, grammar = terms
    check_prompt(tokens, limits, param)
    sampling = sampling_params(body, len(tokens), limits)
    return [
        Request(
            id=uuid.uuid4().hex,
            tokens=tokens,
            sampling=msgspec.structs.replace(sampling, seed=choice_seed(sampling.seed, i)),
            cache_salt=body.cache_salt or "",
            priority=body.priority or 0,
            deadline_s=deadline_s,
            prompt=body.prompt_params if isinstance(body, CompletionRequest) else None,
            grammar=grammar,
        )
        for i in range(body.num_sampled)
    ]


def token_source(body: ChatRequest, thinking: Thinking, tokenizer: Tokenizer) -> Source:
    """Raises InvalidRequest where thoughts cannot be made to go on."""
    if not body.thinking_waits:
        return STRAIGHT
    close_id = tokenizer.id_of(CLOSE)
    if thinking is Thinking.NONE or close_id is None:
        raise InvalidRequest(
            f"thinking_waits needs a model that thinks, is told to, and has a token {CLOSE}", param="thinking_waits"
        )
    if body.logprobs:
        raise InvalidRequest("thinking_waits puts in words that have no logprobs: drop one", param="thinking_waits")
    budget = math.inf if body.thinking_budget is None else body.thinking_budget
    return BudgetForcing(body.thinking_waits, close_id, tokenizer.encode_prompt_now(GO_ON), budget)


def for_template(message: Message) -> dict[str, Any]:
    """Give the template what it knows: `developer` is OpenAI's newer name for the system role."""
    role = "system" if message.role == "developer" else message.role
    fields: dict[str, Any] = {"role": role, "content": message.content or ""}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        fields["tool_calls"] = [_call_for_template(call) for call in message.tool_calls]
    return fields


def _call_for_template(call: ToolCall) -> dict[str, Any]:
    """Templates want the arguments as an object."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        raise InvalidRequest("a tool call's arguments in messages are not valid JSON", param="messages") from None
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
