"""The prefill side of every hand-over of one worker, as a state machine: events in, actions out.

It writes into a peer's memory only between that peer's Place and its Abort, and lets go of blocks only when no write
from them is pending. Events of attempts that have ended are ignored, so duplicates and stragglers do no harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from baton.transfer.actions import CancelPrefill, Prefill, Release, Send, SourceAction, SourceBlock, Write
from baton.transfer.lease import LeaseTable
from baton.transfer.mover import Completion, Incarnation
from baton.transfer.wire import (
    Abort,
    Admitted,
    Attempt,
    Beat,
    Failed,
    Landed,
    Message,
    Open,
    Place,
    Prefilled,
    Stopped,
    WriteTag,
    decode_tag,
    encode_tag,
)


@dataclass(slots=True, kw_only=True)
class Export:
    """One live attempt. Blocks are counted in the peer's size.

    0          skip_blocks      num_pushed       num_ready       num_blocks
    |-- D has it --|-- writes posted --|-- computed --|-- to compute --|
    """

    attempt: Attempt
    skip_blocks: int
    num_blocks: int
    num_pushed: int
    num_ready: int = 0
    blocks: Sequence[SourceBlock] = ()  # ours, of the prompt's first num_ready blocks or more
    place: tuple[int, ...] | None = None  # D's, of the prompt's blocks from skip_blocks on
    num_writes: int = 0
    pending: set[int] = field(default_factory=set[int])  # numbers of the writes that have not ended
    admitted: bool = False
    computing: bool = True  # the engine still owes on_prefilled or on_failed
    result: msgspec.Raw | None = None
    ending: bool = False
    reply: Message | None = None  # sent when the last write has ended


class HandoverSource:
    """Not thread-safe: one caller, in order. `now` is any clock that only this process reads."""

    def __init__(self, *, lease_s: float, beat_s: float, max_write_blocks: int) -> None:
        self._beat_s = beat_s
        self._max_write_blocks = max_write_blocks
        self._exports: dict[Attempt, Export] = {}
        self._leases: LeaseTable[Attempt, Incarnation] = LeaseTable(lease_s)
        self._newest_epoch: dict[Incarnation, int] = {}  # of any Open or Abort; see _note_epoch
        self._next_beat = 0.0

    def __len__(self) -> int:
        """Count the attempts that still hold blocks or wait for a write to end."""
        return len(self._exports)

    def is_writing(self, peer: Incarnation) -> bool:
        """Tell whether any write into the peer's memory has not ended yet."""
        return any(export.pending for export in self._exports.values() if export.attempt.peer == peer)

    # What the peer says.

    def on_peer_connected(self, peer: Incarnation) -> list[SourceAction]:
        """Begin a new stream from `peer`: what an older one left behind is over."""
        return self.on_peer_lost(peer)

    def on_peer_lost(self, peer: Incarnation) -> list[SourceAction]:
        """Give up everything of a peer whose current stream broke, or whose successor has connected."""
        lost = [export for export in self._exports.values() if export.attempt.peer == peer]
        return [action for export in lost for action in self._fail(export, "the hand-over stream was lost")]

    def on_message(self, peer: Incarnation, message: Message, now: float) -> list[SourceAction]:
        self._leases.renew(peer, now)
        match message:
            case Open():
                return self._on_open(peer, message, now)
            case Place():
                return self._on_place(peer, message)
            case Landed():
                export = self._exports.get(Attempt(peer, message.handover, message.epoch))
                return self._end(export, None) if export else []
            case Abort():
                return self._on_abort(peer, message)
            case _:
                return []

    # What our engine and mover say.

    def on_admitted(self, attempt: Attempt) -> list[SourceAction]:
        """Tell D, as the first chunk is scheduled, to name a place; implied by the two events below."""
        export = self._exports.get(attempt)
        return self._admit(export) if export else []

    def on_progress(
        self, attempt: Attempt, num_computed_blocks: int, blocks: Sequence[SourceBlock]
    ) -> list[SourceAction]:
        """Push on: the first `num_computed_blocks` of the prompt's blocks are complete in memory, at `blocks`."""
        export = self._exports.get(attempt)
        if export is None or export.ending:
            return []
        export.blocks = blocks
        export.num_ready = max(export.num_ready, min(num_computed_blocks, export.num_blocks))
        return self._admit(export) + self._push(export)

    def on_prefilled(self, attempt: Attempt, blocks: Sequence[SourceBlock], result: msgspec.Raw) -> list[SourceAction]:
        """Push the rest, the partial last block included, and pass the result on at once."""
        export = self._exports.get(attempt)
        if export is None or export.ending:
            return []
        export.computing = False
        export.result = result
        pushed = self.on_progress(attempt, export.num_blocks, blocks)
        return [*pushed, self._prefilled(export, result)]

    def on_failed(self, attempt: Attempt, error: str) -> list[SourceAction]:
        export = self._exports.get(attempt)
        if export is None:
            return []
        export.computing = False
        return self._fail(export, error)

    def on_completion(self, completion: Completion) -> list[SourceAction]:
        """Note that a write ended; a failed one ends its attempt."""
        tag = decode_tag(completion.tag)
        export = self._exports.get(Attempt(completion.peer, tag.handover, tag.epoch))
        if export is None:
            return []
        export.pending.discard(tag.number)
        if completion.error is not None:
            return self._fail(export, completion.error)
        return self._settle(export)

    def tick(self, now: float) -> list[SourceAction]:
        """End the attempts whose lease is over, and show that we live; call it several times per beat."""
        actions: list[SourceAction] = []
        for attempt in self._leases.sweep(now):
            actions += self._fail(self._exports[attempt], "lease ended: no sign of the decode worker")
        if now >= self._next_beat:
            self._next_beat = now + self._beat_s
            actions += [Send(peer, Beat()) for peer in self._leases.groups()]
        return actions

    # Below, `export` is live.

    def _on_open(self, peer: Incarnation, message: Open, now: float) -> list[SourceAction]:
        attempt = Attempt(peer, message.handover, message.epoch)
        if attempt in self._exports:
            return []
        if not self._note_epoch(attempt):
            return [Send(peer, Failed(handover=attempt.handover, epoch=attempt.epoch, error="this attempt is over"))]
        self._exports[attempt] = Export(
            attempt=attempt,
            skip_blocks=message.skip_blocks,
            num_blocks=message.num_blocks,
            num_pushed=message.skip_blocks,
        )
        self._leases.grant(attempt, peer, now)
        return [Prefill(attempt, message)]

    def _on_place(self, peer: Incarnation, message: Place) -> list[SourceAction]:
        export = self._exports.get(Attempt(peer, message.handover, message.epoch))
        if export is None or export.ending or export.place is not None:
            return []
        wanted = export.num_blocks - export.skip_blocks
        if len(message.blocks) != wanted:
            return self._fail(export, f"Place.blocks names {len(message.blocks)} blocks, Open asked for {wanted}")
        export.place = message.blocks
        pushed = self._push(export)
        return pushed if export.result is None else [*pushed, self._prefilled(export, export.result)]

    def _on_abort(self, peer: Incarnation, message: Abort) -> list[SourceAction]:
        attempt = Attempt(peer, message.handover, message.epoch)
        self._note_epoch(attempt)  # an Open that this Abort overtook must not begin
        stopped = Stopped(handover=attempt.handover, epoch=attempt.epoch)
        export = self._exports.get(attempt)
        return self._end(export, stopped) if export else [Send(peer, stopped)]

    def _note_epoch(self, attempt: Attempt) -> bool:
        """Note that the peer has spoken of this epoch; tell whether it is newer than all that it spoke of before.

        Epochs count up over all attempts of a peer's life, and one stream keeps their order. So one number per peer
        refuses every Open that an Abort or a newer stream has overtaken, for ever and in bounded memory.
        """
        newest = self._newest_epoch.get(attempt.peer, -1)
        self._newest_epoch[attempt.peer] = max(newest, attempt.epoch)
        return attempt.epoch > newest

    def _admit(self, export: Export) -> list[SourceAction]:
        if export.admitted or export.ending:
            return []
        export.admitted = True
        peer, handover, epoch = export.attempt
        return [Send(peer, Admitted(handover=handover, epoch=epoch))]

    def _push(self, export: Export) -> list[SourceAction]:
        """Post what is computed and not yet pushed, once there is a place for it."""
        actions: list[SourceAction] = []
        if export.place is None:
            return actions
        _, handover, epoch = export.attempt
        for start in range(export.num_pushed, export.num_ready, self._max_write_blocks):
            end = min(start + self._max_write_blocks, export.num_ready)
            tag = encode_tag(WriteTag(handover, epoch, export.num_writes))
            target = export.place[start - export.skip_blocks : end - export.skip_blocks]
            actions.append(Write(export.attempt, export.blocks[start:end], target, tag))
            export.pending.add(export.num_writes)
            export.num_writes += 1
            export.num_pushed = end
        return actions

    def _prefilled(self, export: Export, result: msgspec.Raw) -> Send:
        peer, handover, epoch = export.attempt
        num_writes = None if export.place is None else export.num_writes
        return Send(peer, Prefilled(handover=handover, epoch=epoch, num_writes=num_writes, result=result))

    def _fail(self, export: Export, error: str) -> list[SourceAction]:
        if export.ending:
            return self._settle(export)
        _, handover, epoch = export.attempt
        return self._end(export, Failed(handover=handover, epoch=epoch, error=error))

    def _end(self, export: Export, reply: Message | None) -> list[SourceAction]:
        """Post nothing more; `reply` follows when nothing is pending. A later reason replaces an earlier reply."""
        export.ending = True
        export.reply = reply
        self._leases.end(export.attempt)
        actions: list[SourceAction] = []
        if export.computing:
            export.computing = False
            actions.append(CancelPrefill(export.attempt))
        return actions + self._settle(export)

    def _settle(self, export: Export) -> list[SourceAction]:
        if not export.ending or export.pending:
            return []
        del self._exports[export.attempt]
        actions: list[SourceAction] = [Release(export.attempt)]
        if export.reply is not None:
            actions.append(Send(export.attempt.peer, export.reply))
        return actions
