"""How the supervisor sees the processes it watches, and whoever starts them: protocols, so that tests need no Ray.

Every call may raise ProcessLostError. A process is identified by its `boot`, a random id per operating-system process:
a restarted one answers under the same name with another boot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from baton.actors.engine.updates import BlockCounts
from baton.actors.messages import WorkerInfo
from baton.cluster.config import WorkerSpec

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Life(Generic[T_co]):
    """One answer to a probe. Still starting when both `ready` and `failure` are None."""

    boot: str
    ready: T_co | None = None
    failure: str | None = None  # why the last try to start failed; the next probe tries again


class Process(Protocol[T_co]):
    @property
    def name(self) -> str: ...

    async def probe(self) -> Life[T_co]:
        """Answer at once, whatever the process is busy with; the first probe of a life begins its start."""
        ...

    async def stop(self) -> None:
        """End what the process does, in order; the process itself ends with `Launcher.close`."""
        ...


class WorkerProcess(Process[WorkerInfo], Protocol):
    async def peer_dead(self, incarnation: str) -> None: ...

    async def counts(self) -> BlockCounts: ...


class GatewayProcess(Process[str], Protocol):
    """Its `ready` is the HTTP address."""

    async def set_workers(self, workers: list[WorkerInfo]) -> None: ...


class Launcher(Protocol):
    """Places and starts processes that are restarted when they die, until `close`."""

    async def place(self, specs: Sequence[WorkerSpec]) -> None:
        """Reserve room for every worker, or raise ResourcesShortError with nothing reserved."""
        ...

    def launch_worker(self, spec: WorkerSpec) -> WorkerProcess:
        """Start a placed worker; its probes tell how that goes."""
        ...

    def launch_gateway(self) -> GatewayProcess: ...

    async def close(self) -> None:
        """Kill every process and give every reservation back. Idempotent."""
        ...
