"""When a sequence ends: end-of-sequence and stop ids, and lengths.

An id that stops a sequence is delivered among its tokens like any other, so that usage counts it; whoever makes text
of the ids leaves special ones out.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.actors.engine.request import FinishReason, Request


@dataclass(frozen=True, slots=True)
class StopRules:
    stop_ids: frozenset[int]
    min_len: int  # a stop id ends the sequence only when at least so many tokens stand before it
    max_len: int  # tokens of prompt and output

    @classmethod
    def of(cls, request: Request, eos_token_ids: frozenset[int], capacity: int) -> StopRules:
        """Lengths count from the original prompt, whatever part of the output a migrated request brings along."""
        sampling = request.sampling
        eos = frozenset[int]() if sampling.ignore_eos else eos_token_ids
        return cls(
            stop_ids=eos.union(sampling.stop_token_ids),
            min_len=request.prompt_len + sampling.min_tokens,
            max_len=min(request.prompt_len + sampling.max_tokens, capacity),
        )

    def ended(self, request: Request) -> FinishReason | None:
        """Decide whether a migrated request came with its last token: its old worker died before it said so."""
        num_tokens = len(request.tokens)
        if request.num_output:
            return self.reason(request.tokens[-1], num_tokens)
        return "length" if num_tokens >= self.max_len else None

    def reason(self, token: int, num_tokens: int) -> FinishReason | None:
        """Decide whether `token`, the last of `num_tokens`, ends the sequence."""
        if token in self.stop_ids and num_tokens > self.min_len:
            return "stop"
        return "length" if num_tokens >= self.max_len else None
