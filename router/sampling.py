"""From a validated body to `SamplingParams`: the checks that need the model's vocabulary and context.

Every error names the field, the limit and the fix.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeVar

from baton.actors.engine.request import SamplingParams
from baton.router.errors import InvalidRequest
from baton.router.generation_config import SamplingDefaults
from baton.router.openai_models import ChatRequest, CompletionRequest, GenerationFields

Number = TypeVar("Number", int, float)

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for plain completions


@dataclass(frozen=True, slots=True)
class ModelLimits:
    vocab_size: int
    context: int  # tokens, prompt and output together
    defaults: SamplingDefaults


def sampling_params(body: ChatRequest | CompletionRequest, prompt_len: int, limits: ModelLimits) -> SamplingParams:
    """Build the parameters of choice 0; `with_seed` makes the others'."""
    max_tokens = output_budget(body, prompt_len, limits)
    defaults = limits.defaults
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {min_tokens}, more than the {max_tokens} tokens that may be generated: lower it",
            param="min_tokens",
        )
    return SamplingParams(
        max_tokens=max(max_tokens, 1),  # an echoed prompt alone takes a step too
        seed=body.seed % 2**63 if body.seed is not None else secrets.randbits(63),
        temperature=_or(body.temperature, defaults.temperature),
        top_k=min(max(_or(body.top_k, defaults.top_k), 0), limits.vocab_size),
        top_p=_or(body.top_p, defaults.top_p),
        min_p=_or(body.min_p, defaults.min_p),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, defaults.repetition_penalty),
        logit_bias=_logit_bias(body, limits.vocab_size),
        min_tokens=min_tokens,
        stop_token_ids=_in_vocabulary("stop_token_ids", body.stop_token_ids or [], limits.vocab_size),
        ignore_eos=bool(body.ignore_eos),
        logprobs=_num_logprobs(body),
    )


def choice_seed(seed: int, choice: int) -> int:
    """Derive the seed of one of n choices; the first keeps the client's."""
    if choice == 0:
        return seed
    return int.from_bytes(blake2b(f"{seed}:{choice}".encode(), digest_size=8).digest(), "big") >> 1


def check_prompt(tokens: tuple[int, ...], limits: ModelLimits, param: str) -> None:
    if not tokens:
        raise InvalidRequest(f"{param} has no tokens: give at least one", param=param)
    check_length(len(tokens), limits.context, param)
    _in_vocabulary(param, tokens, limits.vocab_size)


def check_length(num_tokens: int, context: int, param: str) -> None:
    if num_tokens >= context:
        raise InvalidRequest(
            f"{param} has {num_tokens} tokens; the context is {context}, output included: shorten it", param=param
        )


def output_budget(body: ChatRequest | CompletionRequest, prompt_len: int, limits: ModelLimits) -> int:
    room = limits.context - prompt_len
    field, asked = "max_tokens", body.max_tokens
    if isinstance(body, ChatRequest):
        if body.max_completion_tokens is not None:
            field, asked = "max_completion_tokens", body.max_completion_tokens
        if asked is None:
            return room
    elif asked is None:
        return min(max(COMPLETION_MAX_TOKENS, body.min_tokens or 0), room)
    if asked > room:
        raise InvalidRequest(
            f"{field} is {asked}, the prompt has {prompt_len} tokens and the context is {limits.context}: "
            f"ask for at most {room}",
            param=field,
        )
    return asked


def _num_logprobs(body: ChatRequest | CompletionRequest) -> int | None:
    asked = (
        body.logprobs if isinstance(body, CompletionRequest) else (body.top_logprobs or 0) if body.logprobs else None
    )
    is_ranked = body.num_sampled > (body.n or 1)
    return 0 if asked is None and is_ranked else asked


def _logit_bias(body: GenerationFields, vocab_size: int) -> dict[int, float]:
    bias = body.logit_bias or {}
    if not all(re.fullmatch(r"[0-9]{1,10}", key) for key in bias):
        raise InvalidRequest("logit_bias keys must be token ids, written as decimal numbers", param="logit_bias")
    ids = _in_vocabulary("logit_bias", tuple(map(int, bias)), vocab_size)
    return dict(zip(ids, bias.values(), strict=True))


def _in_vocabulary(param: str, ids: tuple[int, ...] | list[int], vocab_size: int) -> tuple[int, ...]:
    if ids and max(ids) >= vocab_size:
        raise InvalidRequest(
            f"{param} has a token id outside the vocabulary: ids run from 0 to {vocab_size - 1}", param=param
        )
    return tuple(ids)


def _or(value: Number | None, default: Number) -> Number:
    return default if value is None else value
