"""What a client wants, as plain frozen data that crosses processes.

Knows tokens and sampling; knows no text, no KV, no worker.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "cancelled", "error"]
Pooling = Literal["mean", "last"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen. The gateway has validated every range and filled every default.

    `seed` is always set: the random number for a position is a pure function of (seed, position), so any worker
    that knows the tokens can go on from them.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # number of alternatives beside the chosen token's; None = no logprobs at all


class PromptParams(msgspec.Struct, frozen=True, kw_only=True):
    """What the client wants to know of the prompt's own tokens."""

    logprobs: int | None = None  # number of alternatives beside each token's own; None = no logprobs at all
    pooling: Pooling | None = None  # of the last layer's normed hidden states

    @property
    def is_of_every_token(self) -> bool:
        """Whether each of the prompt's tokens must be computed, cached or not."""
        return self.logprobs is not None or self.pooling == "mean"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate. The last `num_output` of `tokens` are output already: a migrated request."""

    id: str
    tokens: tuple[int, ...]
    sampling: SamplingParams
    num_output: int = 0
    cache_salt: str = ""
    priority: int = 0  # lower goes first
    deadline_s: float | None = None  # seconds left when sent: clocks are not compared
    prompt: PromptParams | None = None
    grammar: str = ""  # what the whole output must match, as an xgrammar structural tag in JSON; empty = anything

    trace: str = ""  # W3C traceparent of the gateway's span; "" = not traced

    @property
    def prompt_len(self) -> int:
        return len(self.tokens) - self.num_output


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities (natural log, before temperature) of one sampled token and its best alternatives."""

    chosen: float
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()


class PromptOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to PromptParams; comes once, with the first sampled token."""

    logprobs: tuple[TokenLogprobs, ...] = ()  # of every prompt token but the first
    pooled: bytes = b""  # [hidden] little-endian float32
