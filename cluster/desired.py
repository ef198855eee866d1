"""What an operator wants of a cluster, as a value: every change makes a new one. Pure; the supervisor makes it true."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Self

from pydantic import BaseModel, ConfigDict

from baton.actors.messages import Role
from baton.cluster.config import ClusterConfig, PoolConfig, WorkerSpec
from baton.cluster.errors import OperationRefusedError
from baton.cluster.quarantine import Quarantined


class Desired(BaseModel):
    """`workers` is the truth; the replicas of `config`'s pools follow it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: ClusterConfig
    workers: tuple[WorkerSpec, ...]
    quarantine: tuple[Quarantined, ...] = ()

    @classmethod
    def of(cls, config: ClusterConfig) -> Self:
        return cls(config=config, workers=config.worker_specs())

    def of_role(self, role: Role) -> tuple[WorkerSpec, ...]:
        return tuple(spec for spec in self.workers if spec.role == role)

    def worker(self, worker_id: str) -> WorkerSpec:
        for spec in self.workers:
            if spec.worker_id == worker_id:
                return spec
        raise OperationRefusedError(f"there is no worker {worker_id!r}; there are {_names(self.workers)}")

    def scaled(self, role: Role, replicas: int) -> Desired:
        """Add workers with the first free names, or take the last ones away."""
        if role not in self.config.pools:
            raise OperationRefusedError(f"there is no pool {role!r}; the pools are {', '.join(self.config.pools)}")
        present = self.of_role(role)
        if replicas <= len(present):
            return self._with([spec.worker_id for spec in present[replicas:]])
        taken = {spec.worker_id for spec in self.workers}
        numbers = (name for index in range(len(taken) + replicas) if (name := f"{role}-{index}") not in taken)
        added = [self.config.worker_spec(next(numbers), role) for _ in range(replicas - len(present))]
        return self._with((), added)

    def without(self, worker_id: str) -> Desired:
        return self._with([self.worker(worker_id).worker_id])

    def with_role(self, worker_id: str, role: Role) -> Desired:
        """Let a worker do the work of another pool; it keeps its name, memory and settings."""
        if role not in self.config.pools:
            raise OperationRefusedError(f"there is no pool {role!r} to join; add one to the configuration")
        return self._updated([worker_id], lambda spec: {"role": role})

    def restarted(self, worker_ids: Iterable[str]) -> Desired:
        return self._updated(worker_ids, lambda spec: {"generation": spec.generation + 1})

    def applied(self, config: ClusterConfig) -> Desired:
        """Take over a new configuration; workers keep their names, so that only what differs is started anew."""
        if config.name != self.config.name:
            raise OperationRefusedError(f"the running cluster is named {self.config.name!r}, not {config.name!r}")
        workers: list[WorkerSpec] = []
        for role, pool in config.pools.items():
            kept = self.of_role(role)[: pool.replicas]
            workers += [
                config.worker_spec(spec.worker_id, role).model_copy(
                    update={"generation": spec.generation, "place": spec.place}
                )
                for spec in kept
            ]
        grown = self.model_copy(update={"config": config, "workers": tuple(workers)})
        for role, pool in config.pools.items():
            grown = grown.scaled(role, pool.replicas)
        return grown

    def moved(self, bad: Quarantined) -> Desired:
        """Take a place out of use; the worker that failed there gets another."""
        moved = self._updated([bad.worker_id], lambda spec: {"place": spec.place + 1})
        return moved.model_copy(update={"quarantine": (*self.quarantine, bad)})

    def released(self, place: str) -> Desired:
        """Let a place be used again."""
        left = tuple(bad for bad in self.quarantine if bad.name != place)
        if left == self.quarantine:
            present = ", ".join(bad.name for bad in self.quarantine) or "nothing"
            raise OperationRefusedError(f"{place!r} is not in quarantine; {present} is")
        return self.model_copy(update={"quarantine": left})

    def _updated(self, worker_ids: Iterable[str], change: Callable[[WorkerSpec], dict[str, object]]) -> Desired:
        chosen = {self.worker(worker_id).worker_id for worker_id in worker_ids}
        updated = (s.model_copy(update=change(s)) if s.worker_id in chosen else s for s in self.workers)
        return self._copy(self.config, tuple(updated))

    def _with(self, gone: Collection[str], added: Iterable[WorkerSpec] = ()) -> Desired:
        kept = [spec for spec in self.workers if spec.worker_id not in gone]
        return self._copy(self.config, (*kept, *added))

    def _copy(self, config: ClusterConfig, workers: tuple[WorkerSpec, ...]) -> Desired:
        roles = [spec.role for spec in workers]
        if not {"decode", "both"} & set(roles):
            raise OperationRefusedError("that would leave nobody to decode; add another decode worker first")
        if "decode" in roles and not {"prefill", "both"} & set(roles):
            raise OperationRefusedError("that would leave nobody to prefill; add another prefill worker first")
        pools: dict[Role, PoolConfig] = {
            role: pool.model_copy(update={"replicas": roles.count(role)}) for role, pool in config.pools.items()
        }
        return self.model_copy(update={"config": config.model_copy(update={"pools": pools}), "workers": workers})


def _names(specs: Iterable[WorkerSpec]) -> str:
    return ", ".join(spec.worker_id for spec in specs)
