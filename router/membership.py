"""Which workers there are now, as the cluster says: connects to the new, lets go of the gone.

A worker that leaves the list keeps its stream until its running requests end (it drains); a worker that comes back
as another life has its old stream closed at once, since that life is dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from baton.actors.messages import WorkerInfo
from baton.router.prefix_index import PrefixIndex
from baton.router.worker_stream import Reconnect, WorkerStream


class Membership:
    def __init__(self, index: PrefixIndex, reconnect: Reconnect) -> None:
        self._index = index
        self._reconnect = reconnect
        self._streams: dict[str, WorkerStream] = {}  # by incarnation, retired ones too
        self._retirements: set[asyncio.Task[None]] = set()
        self._usable: dict[str, WorkerStream] = {}  # these and the next two follow every change: they are read often
        self._decoders: tuple[WorkerStream, ...] = ()
        self._prefillers: tuple[WorkerStream, ...] = ()
        self.on_news: Callable[[WorkerStream], None] = lambda stream: None  # a worker has reported, come or gone

    async def set_workers(self, workers: Sequence[WorkerInfo]) -> None:
        """Make `workers` all there are. Raises ValueError when two share an id."""
        wanted = {info.peer.worker_id: info for info in workers}
        if len(wanted) != len(workers):
            raise ValueError(f"worker ids are not unique: {sorted(info.peer.worker_id for info in workers)}")
        dead: list[WorkerStream] = []
        for stream in list(self._streams.values()):
            info = wanted.get(stream.info.peer.worker_id)
            if info is None:
                self._retire(stream)
            elif info.peer != stream.info.peer:
                dead.append(self._streams.pop(stream.incarnation))
        for info in wanted.values():
            self._connect(info)
        self._sort()
        for stream in dead:
            self.on_news(stream)
        await asyncio.gather(*(stream.close() for stream in dead))

    def decoders(self) -> Sequence[WorkerStream]:
        """Return the workers that can take a request now."""
        return self._decoders

    def prefillers(self) -> Sequence[WorkerStream]:
        return self._prefillers

    def is_connected(self) -> bool:
        """Return whether every worker of the last list can be sent requests."""
        return all(stream.is_usable for stream in self._members())

    def max_context(self) -> int | None:
        """Return the context that every decode worker can hold, or None while none is known."""
        return min((s.info.max_context for s in self._members() if s.info.role != "prefill"), default=None)

    def why_unusable(self) -> str | None:
        """Say why no request can be served now; None if one can."""
        if self._decoders:
            return None
        known = [stream for stream in self._members() if stream.info.role != "prefill"]
        if not known:
            return "no decode worker has registered"
        return f"none of the {len(known)} known decode workers is connected"

    async def close(self) -> None:
        for task in self._retirements:
            task.cancel()
        await asyncio.gather(*(stream.close() for stream in self._streams.values()))
        self._streams.clear()
        self._sort()

    def _hear(self, stream: WorkerStream) -> None:
        if stream.is_usable != (stream.incarnation in self._usable):
            self._sort()
        self.on_news(stream)

    def _sort(self) -> None:
        self._usable = {incarnation: stream for incarnation, stream in self._streams.items() if stream.is_usable}
        self._decoders = tuple(stream for stream in self._usable.values() if stream.info.role != "prefill")
        self._prefillers = tuple(stream for stream in self._usable.values() if stream.info.role == "prefill")

    def _members(self) -> list[WorkerStream]:
        return [stream for stream in self._streams.values() if not stream.is_retired]

    def _connect(self, info: WorkerInfo) -> None:
        stream = self._streams.get(info.peer.incarnation)
        if stream is None:
            stream = self._streams[info.peer.incarnation] = WorkerStream(info, self._index, self._reconnect, self._hear)
            stream.start()
        stream.info = info
        stream.is_retired = False

    def _retire(self, stream: WorkerStream) -> None:
        if stream.is_retired:
            return
        stream.is_retired = True
        task = asyncio.create_task(self._close_when_idle(stream))
        self._retirements.add(task)
        task.add_done_callback(self._retirements.discard)

    async def _close_when_idle(self, stream: WorkerStream) -> None:
        await stream.wait_idle()
        if stream.is_retired and self._streams.get(stream.incarnation) is stream:
            del self._streams[stream.incarnation]
            await stream.close()
