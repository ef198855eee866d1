"""How the supervisor sees the processes it watches, and whoever starts them: protocols, so that tests need no Ray.

Every call may raise ProcessLostError. A process that has ended never comes back: its successor is another object.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from baton.actors.engine.updates import BlockCounts
from baton.actors.messages import Role, WorkerInfo
from baton.cluster.config import WorkerSpec

if TYPE_CHECKING:
    from baton.router.usage import Usage


T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process runs: a node and, if it has any, its devices there."""

    node_id: str
    host: str
    devices: tuple[str, ...] = ()

    def __str__(self) -> str:
        """What an operator calls it."""
        return "/".join([self.node_id[:8], *(f"gpu{device}" for device in self.devices)])


@dataclass(frozen=True, slots=True)
class Life(Generic[T_co]):
    """One answer to a probe. Still starting when both `ready` and `failure` are None."""

    ready: T_co | None = None
    failure: str | None = None  # this process will not serve, or not any more
    place: Place | None = None
    pid: int | None = None
    is_leaving: bool = False  # ends by itself, once what runs on it has ended
    busy_s: float = 0.0  # how long the step that computes now has been computing


@dataclass(frozen=True, slots=True)
class News:
    """What a gateway is told of the workers."""

    workers: tuple[WorkerInfo, ...]  # that can be relied on now
    is_decoder_coming: bool  # another that decodes: requests may wait for it


class Process(Protocol[T_co]):
    @property
    def name(self) -> str: ...

    async def probe(self) -> Life[T_co]:
        """Answer at once, whatever the process is busy with; the first probe begins its start."""
        ...

    async def stop(self) -> None:
        """End what the process does, in order; the process itself ends with `kill`."""
        ...

    async def kill(self) -> None:
        """End the process, and return once it is known to have ended, or when nobody can tell any more."""
        ...


class WorkerProcess(Process[WorkerInfo], Protocol):
    async def peer_dead(self, incarnation: str) -> None: ...

    async def counts(self) -> BlockCounts: ...

    async def drain(self, wait_s: float) -> None:
        """Take no new requests; let the running ones end for `wait_s`, then hand them back to their gateways."""
        ...

    async def set_role(self, role: Role) -> WorkerInfo: ...

    async def profile(self, seconds: float) -> bytes:
        """Record what the engine does meanwhile; return a gzipped Chrome trace."""
        ...


class GatewayProcess(Process[str], Protocol):
    """Its `ready` is the HTTP address."""

    async def set_workers(self, news: News) -> None: ...

    async def is_connected(self) -> bool:
        """Return whether it can send requests to every worker that it was told of."""
        ...

    async def usage(self) -> Usage: ...


class Kept(Protocol):
    """A place in quarantine: the `number`-th reservation of the worker."""

    @property
    def place(self) -> Place: ...

    @property
    def worker_id(self) -> str: ...

    @property
    def number(self) -> int: ...


class Launcher(Protocol):
    """Reserves places and starts processes in them. A process that dies stays dead until it is launched again."""

    async def place(self, specs: Sequence[WorkerSpec]) -> None:
        """Reserve room for every worker that has none yet, or raise ResourcesShortError with nothing more reserved."""
        ...

    def launch_worker(self, spec: WorkerSpec) -> WorkerProcess:
        """Start a placed worker; its probes tell how that goes."""
        ...

    def launch_gateway(self, index: int) -> GatewayProcess: ...

    def find_worker(self, spec: WorkerSpec) -> WorkerProcess | None:
        """Return the worker if a controller before this one has left it running."""
        ...

    def find_gateway(self, index: int) -> GatewayProcess | None: ...

    def release(self, worker_id: str) -> None:
        """Give a dead worker's reservation back, unless it is kept."""
        ...

    def keep(self, places: Collection[Kept]) -> None:
        """Keep these dead workers' reservations and nodes from all use, and give back what was kept before."""
        ...

    def request(self, specs: Sequence[WorkerSpec]) -> None:
        """Ask for nodes that hold all of these workers, where somebody can add some."""
        ...

    def is_there(self, node_id: str) -> bool:
        """Whether the node is part of the cluster now."""
        ...

    async def close(self) -> None:
        """Kill every process and give every reservation back. Idempotent."""
        ...


class Store(Protocol):
    """Keeps the controller's knowledge for the one that follows it."""

    def load(self) -> bytes | None: ...

    def save(self, state: bytes) -> None: ...

    def clear(self) -> None: ...


class NoStore:
    """For a supervisor whose processes end with it."""

    def load(self) -> bytes | None:
        return None

    def save(self, state: bytes) -> None:
        pass

    def clear(self) -> None:
        pass
