"""From a validated body to what is to be generated: tokenised prompts, one Request per choice, and how to answer."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from baton.actors.engine.request import Request
from baton.router.errors import InvalidRequest
from baton.router.generation import Echo
from baton.router.openai_models import ChatRequest, CompletionRequest, Message
from baton.router.sampling import ModelLimits, check_prompt, choice_seed, sampling_params
from baton.router.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Plan:
    """`requests` has `num_choices` entries for each prompt, in order; `echo` is what each of them starts with."""

    body: ChatRequest | CompletionRequest
    requests: Sequence[Request]
    num_choices: int
    echo: Sequence[Echo | None]


async def plan_chat(body: ChatRequest, tokenizer: Tokenizer, limits: ModelLimits, deadline_s: float) -> Plan:
    tokens = await tokenizer.encode_chat([for_template(message) for message in body.messages])
    requests = _requests(body, tokens, "messages", limits, deadline_s)
    return Plan(body, requests, len(requests), [None] * len(requests))


async def plan_completion(
    body: CompletionRequest, tokenizer: Tokenizer, limits: ModelLimits, deadline_s: float
) -> Plan:
    num_choices = body.n or 1
    if num_choices * len(body.prompt) > 1024:
        raise InvalidRequest(
            f"{len(body.prompt)} prompts times n = {num_choices} is more than 1024: send fewer", param="n"
        )
    requests: list[Request] = []
    echo: list[Echo | None] = []
    for prompt in body.prompt:
        tokens = await tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else tuple(prompt)
        requests += _requests(body, tokens, body.prompt_field, limits, deadline_s)
        text = prompt if isinstance(prompt, str) else tokenizer.decode(tokens)
        echo += [Echo(text, is_all=body.max_tokens == 0) if body.echo else None] * num_choices
    return Plan(body, requests, num_choices, echo)


def _requests(
    body: ChatRequest | CompletionRequest, tokens: tuple[int, ...], param: str, limits: ModelLimits, deadline_s: float
) -> list[Request]:
    """Make one request per choice of one prompt: they differ in id and seed only, and share the tokens' tuple."""
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
        )
        for i in range(body.n or 1)
    ]


def for_template(message: Message) -> dict[str, str]:
    """Give the template what it knows: `developer` is OpenAI's newer name for the system role."""
    role = "system" if message.role == "developer" else message.role
    fields = {"role": role, "content": message.content or ""}
    return fields if message.name is None else fields | {"name": message.name}
