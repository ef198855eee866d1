"""What one engine step tells the worker about its sequences."""

from __future__ import annotations

from dataclasses import dataclass

from baton.actors.engine.request import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Update:
    """News of one sequence. `finish` is set on exactly one update of a sequence: its last."""

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish: FinishReason | None = None
    error: str | None = None
    cached_tokens: int = 0  # prompt tokens that came from the prefix cache or a peer
    num_computed: int = 0  # positions whose KV is complete in memory
    blocks: tuple[int, ...] = ()  # block table of an exported sequence, for the hand-over; empty for others


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """free + cached + held == total, always."""

    total: int
    free: int
    cached: int  # in the prefix cache and referenced by nobody: evictable
    held: int  # referenced by a sequence, an import, or in quarantine
