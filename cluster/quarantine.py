"""Places that no worker is put into until an operator releases them: which failures speak against a place."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from baton.actors.faults import is_device_fault
from baton.cluster.processes import Place
from baton.cluster.watched import WatchedWorker


@dataclass(frozen=True, slots=True)
class Quarantined:
    """`number` names the reservation that keeps the place from others' use, among those of the worker."""

    place: Place
    worker_id: str  # that failed there
    number: int
    why: str
    since_s: float  # time of day

    @property
    def name(self) -> str:
        return str(self.place)


def judged(worker: WatchedWorker, workers: Sequence[WatchedWorker], limit: int) -> Quarantined | None:
    """Say if the failure that the worker has just told of is its place's.

    A device's own fault is, at once. Others are when they come `limit` times in a row while another worker with the
    same settings serves elsewhere: or wrong settings would take every place out of use.
    """
    place, failure = worker.place, worker.failure or ""
    if place is None:
        return None
    why = None
    if is_device_fault(failure):
        why = failure
    elif worker.num_failures >= limit and _serves_elsewhere(worker, workers):
        why = f"failed {worker.num_failures} times in a row here: {failure}"
    if why is None:
        return None
    return Quarantined(place, worker.name, worker.spec.place, why, time.time())


def _serves_elsewhere(worker: WatchedWorker, workers: Sequence[WatchedWorker]) -> bool:
    return any(
        other.current is not None and other.spec.config == worker.spec.config and other.place != worker.place
        for other in workers
    )
