"""Who proposes the tokens that a step verifies. Drafts are guesses: a wrong one costs time, never a token.

Two protocols. A `Drafter` runs on the engine's thread and knows token ids alone. A `DraftModule` (module.py) is a
network that the runner calls after each step of the target; what it proposes comes back to the engine with the step's
output, and `ModuleDrafts` hands it out.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from typing import Protocol

from baton.actors.engine.sequence import Sequence


class Drafter(Protocol):
    """Called by the engine's thread, between two steps, for sequences of which no step is in flight."""

    def propose(self, sequence: Sequence, num: int) -> Tokens[int]:
        """Return up to `num` (at least 1) tokens that may follow `sequence.tokens`; none where there is no good guess.

        Must not depend on the sequence's slot, blocks or neighbours: it may have been preempted, or come from a peer.
        """
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended: drop what was kept of it. Fine if nothing was."""
        ...


class ModuleDrafts:
    """Hands out what the runner's draft module proposed with the step before; see `Sequence.drafts`."""

    def propose(self, sequence: Sequence, num: int) -> Tokens[int]:
        return sequence.drafts[:num]

    def forget(self, sequence: Sequence) -> None:
        sequence.drafts = ()
