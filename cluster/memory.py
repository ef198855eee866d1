"""What a controller must know of the time before its own restart: what was wanted, and who was alive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from baton.actors.messages import WorkerInfo
from baton.cluster.config import WorkerSpec
from baton.cluster.desired import Desired
from baton.cluster.processes import Store
from baton.cluster.watched import WatchedWorker


@dataclass(frozen=True, slots=True)
class KnownWorker:
    spec: WorkerSpec  # its process was launched with
    info: WorkerInfo | None  # of the life that was seen last and has not been seen to end


@dataclass(frozen=True, slots=True)
class State:
    desired: Desired
    workers: tuple[KnownWorker, ...]


class _Saved(msgspec.Struct, frozen=True):
    """JSON inside JSON: pydantic checks what it wrote, msgspec the rest."""

    desired: str
    workers: list[tuple[str, WorkerInfo | None]]


class Memory:
    """Writes only what has changed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._last: State | None = None

    def keep(self, desired: Desired, workers: Sequence[WatchedWorker]) -> None:
        state = State(desired, tuple(KnownWorker(worker.spec, worker.last_known) for worker in workers))
        if state == self._last:
            return
        saved = _Saved(
            desired.model_dump_json(), [(known.spec.model_dump_json(), known.info) for known in state.workers]
        )
        self._store.save(msgspec.json.encode(saved))
        self._last = state

    def recall(self) -> State | None:
        data = self._store.load()
        if data is None:
            return None
        saved = msgspec.json.decode(data, type=_Saved)
        workers = tuple(KnownWorker(WorkerSpec.model_validate_json(spec), info) for spec, info in saved.workers)
        return State(Desired.model_validate_json(saved.desired), workers)

    def forget(self) -> None:
        self._store.clear()
        self._last = None
