"""What the hand-over state machines ask of their worker. Plain data: the machines do no I/O and hold no clock.

The worker carries out a list of actions in its order. Sends to a peer with no open stream are dropped: both machines
recover from that by leases, beats and repeated Aborts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from baton.transfer.mover import Incarnation
from baton.transfer.wire import Attempt, Message, Open

# One of our blocks; or, for a peer of another block size, what of ours fills one of its: see `transfer.route`.
SourceBlock = int | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Send:
    peer: Incarnation
    message: Message


# Of the source (prefill side).


@dataclass(frozen=True, slots=True)
class Prefill:
    """Ask the engine to compute the prompt in `open.request` and to keep its blocks until Release."""

    attempt: Attempt
    open: Open


@dataclass(frozen=True, slots=True)
class CancelPrefill:
    """Compute no further. The blocks stay until Release."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Write:
    """Post this to the mover; it must end in a Completion, failed if it could not be posted."""

    attempt: Attempt
    source_blocks: Sequence[SourceBlock]
    target_blocks: tuple[int, ...]
    tag: bytes


@dataclass(frozen=True, slots=True)
class Release:
    """Let go of the attempt's blocks: nothing reads them any more. Follows every Prefill exactly once."""

    attempt: Attempt


SourceAction = Send | Prefill | CancelPrefill | Write | Release

# Of the target (decode side). Every attempt ends in exactly one of Land, Fallback, Drop.


@dataclass(frozen=True, slots=True)
class Reserve:
    """Ask the engine for blocks; answer with `placed` or `no_room`."""

    attempt: Attempt
    skip_blocks: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Unreserve:
    """Take the attempt's reserved blocks back into the pool: nobody can write them."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Deliver:
    """The prompt is computed: send its first token on. The KV may still be under way."""

    attempt: Attempt
    result: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Land:
    """All KV is in the reserved blocks: let the engine adopt them and go on."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Fallback:
    """The attempt failed: prefill here or elsewhere, from the tokens known so far."""

    attempt: Attempt
    reason: str


@dataclass(frozen=True, slots=True)
class Drop:
    """The attempt is over because its worker aborted it."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Hold the attempt's blocks for nobody: the peer may still write them."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Unquarantine:
    """Give the attempt's quarantined blocks back to the pool."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Tear down the mover's registration of a dead peer, and wait for it, before the actions that follow."""

    peer: Incarnation


TargetAction = Send | Reserve | Unreserve | Deliver | Land | Fallback | Drop | Quarantine | Unquarantine | Disconnect
