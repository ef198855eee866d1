"""Times an engine's steps, with or without overlap, and fits what they cost."""

from __future__ import annotations

from collections import deque
from math import exp

from baton.actors.decode_times import DecodeTimes
from baton.actors.engine.batch import Batch
from baton.actors.step_cost import StepCost, StepCostFit, StepShape

SHARE_S = 5.0
MIN_STEPS = 8  # fewer tell less than the prior


class StepMeter:
    """Told of each step that is launched and how many are then still in flight; times in seconds, monotonic."""

    def __init__(self) -> None:
        self.share = PrefillShare()
        self._fit = StepCostFit()
        self._decodes = DecodeTimes()
        self._in_flight: deque[tuple[Batch, float]] = deque()
        self._last_end = 0.0
        self._last_slots: frozenset[int] = frozenset()  # of the step that ended then

    @property
    def cost(self) -> StepCost | None:
        """What steps cost; None before enough have been seen."""
        return self._fit.cost if self._fit.num_steps >= MIN_STEPS else None

    @property
    def decodes(self) -> DecodeTimes | None:
        """What steps of decodes alone take; None as long as `cost` is."""
        return self._decodes if self._fit.num_steps >= MIN_STEPS else None

    def launched(self, batch: Batch, now: float) -> None:
        self._in_flight.append((batch, now))

    def ended(self, num_in_flight: int, now: float) -> None:
        """All launched steps but `num_in_flight` have ended by now, at the latest one just now.

        A step that was launched while another ran began when that one ended.
        """
        while len(self._in_flight) > num_in_flight:
            batch, launched_at = self._in_flight.popleft()
            since_last_ms = 1e3 * (now - self._last_end)
            step_ms = min(since_last_ms, 1e3 * (now - launched_at))
            self._last_end = now
            if step_ms <= 0:
                continue
            shape = StepShape.of(batch.rows)
            self._fit.add(shape, step_ms)
            cost = self._fit.cost
            self.share.add(min(cost.prefill_part_ms(shape), step_ms), now)
            slots = frozenset(row.slot for row in batch.rows)
            if not slots.isdisjoint(self._last_slots):  # else the engine may have been idle before
                self._decodes.add(shape, cost, since_last_ms, is_overlapped=since_last_ms == step_ms)
            self._last_slots = slots


class PrefillShare:
    """The share of a worker's time that lately went into prefill; what is `SHARE_S` ago counts e times less.

    Time before the first prefill counts as never been, so that a young worker's share is not too low.
    """

    def __init__(self) -> None:
        self._share = 0.0
        self._as_of = 0.0
        self._since: float | None = None

    def add(self, prefill_ms: float, now: float) -> None:
        """Count a step that ends now."""
        if prefill_ms <= 0:
            return
        if self._since is None:
            self._since = now - prefill_ms / 1e3
        self._share = self._faded(now) + prefill_ms / 1e3 / SHARE_S
        self._as_of = now

    def at(self, now: float) -> float:
        if self._since is None:
            return 0.0
        return min(self._faded(now) / (1 - exp((self._since - now) / SHARE_S)), 1.0)

    def _faded(self, now: float) -> float:
        return self._share * exp((self._as_of - now) / SHARE_S)
