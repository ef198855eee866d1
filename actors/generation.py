"""One request's life on the worker that answers it: what was sent so far, and how long each phase took.

Turns engine updates and hand-over news into Outputs. Knows no engine, no stream, no clock but the one it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from baton.actors.engine.request import Request
from baton.actors.engine.updates import Update
from baton.actors.messages import Output, PhaseTimes, PrefillResult, ServedBy, Submit


@dataclass(frozen=True, slots=True)
class Moved:
    """The KV that a hand-over brought."""

    blocks: int
    num_bytes: int
    mover: str


class Lap(NamedTuple):
    name: str
    start_s: float
    end_s: float


class Generation:
    """Mutable record, owned by the worker's asyncio loop."""

    def __init__(self, submit: Submit, worker_id: str, clock: Callable[[], float]) -> None:
        self.submit = submit
        self.sent: list[int] = []
        self._worker_id = worker_id
        self._clock = clock
        self._mark = self.started = clock()  # start of the phase that runs now
        self.laps: list[Lap] = []
        self._queue_s = self._prefill_s = self._handover_s = self._first_step_s = 0.0
        self._cached_tokens: int | None = None
        self._moved: Moved | None = None
        self._is_landed = False

    @property
    def request_id(self) -> str:
        return self.submit.request.id

    @property
    def resumed_request(self) -> Request:
        """The request as it stands now: whoever gets it goes on after the tokens already sent."""
        request = self.submit.request
        return msgspec.structs.replace(
            request, tokens=(*request.tokens, *self.sent), num_output=request.num_output + len(self.sent)
        )

    @property
    def times(self) -> PhaseTimes:
        return PhaseTimes(
            queue_s=self._queue_s,
            prefill_s=self._prefill_s,
            handover_s=self._handover_s,
            first_step_s=self._first_step_s,
        )

    def on_prefilled(self, result: PrefillResult) -> Output:
        """The prefill worker's first token is here; its KV may still be under way."""
        self._queue_s, self._prefill_s = result.queue_s, result.prefill_s
        self._lap("prefill by peer")
        return self._output(Update(
            self.request_id, tokens=result.tokens, logprobs=result.logprobs, cached_tokens=result.cached_tokens
        ))  # fmt: skip

    def on_landed(self, moved: Moved) -> None:
        """All KV is in our blocks."""
        self._handover_s = self._lap("hand-over")
        self._moved = moved
        self._is_landed = True

    def on_update(self, update: Update) -> Output | None:
        """Engine news; None when the client need not hear of it."""
        if not update.tokens and update.finish is None:
            self._queue_s = self._lap("queue")  # first chunk scheduled
            return None
        if update.tokens and not self.sent:
            self._prefill_s = self._lap("prefill")
        elif update.tokens and self._is_landed and not self._first_step_s:
            self._first_step_s = self._lap("first step")
        return self._output(update)

    def _lap(self, name: str) -> float:
        """End the phase that runs now; return how long it took."""
        lap = Lap(name, self._mark, self._clock())
        self._mark = lap.end_s
        self.laps.append(lap)
        return lap.end_s - lap.start_s

    def _output(self, update: Update) -> Output:
        is_first = self._cached_tokens is None
        if is_first:
            self._cached_tokens = update.cached_tokens
        self.sent.extend(update.tokens)
        return Output(
            request_id=self.request_id,
            tokens=update.tokens,
            logprobs=update.logprobs,
            prompt=update.prompt,
            cached_tokens=self._cached_tokens if is_first else None,
            finish=update.finish,
            error=update.error,
            served=self._served() if update.finish is not None else None,
        )

    def _served(self) -> ServedBy:
        prefill, moved = self.submit.prefill, self._moved
        if prefill is None or moved is None:
            return ServedBy(decode_worker=self._worker_id, prefill_worker=self._worker_id, times=self.times)
        return ServedBy(
            decode_worker=self._worker_id,
            prefill_worker=prefill.worker_id,
            mover=moved.mover,
            blocks_moved=moved.blocks,
            bytes_moved=moved.num_bytes,
            times=self.times,
        )
