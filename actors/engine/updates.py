"""What one engine step tells the worker about its sequences."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from baton.actors.engine.request import FinishReason, PromptOutput, TokenLogprobs


class Update(msgspec.Struct, frozen=True, gc=False):  # a tenth of a dataclass's cost, and there are hundreds a step
    """News of one sequence. `finish` is set on exactly one update of a sequence: its last.

    The first update of a sequence that is computed here has no tokens: its first chunk is scheduled. A stop id is
    among `tokens`, for usage; whoever makes text of them leaves it out.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt: PromptOutput | None = None
    finish: FinishReason | None = None
    error: str | None = None
    cached_tokens: int = 0  # prompt tokens that came from the prefix cache or a peer
    num_computed: int = 0  # positions whose KV is complete in memory
    blocks: tuple[int, ...] = ()  # block table of an exported sequence, for the hand-over; empty for others
    drafts: tuple[int, ...] = ()  # what a draft module proposes to follow an exported sequence's token


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """free + cached + held == total, always."""

    total: int
    free: int
    cached: int  # in the prefix cache and referenced by nobody: evictable
    held: int  # referenced by a sequence, an import, or in quarantine
