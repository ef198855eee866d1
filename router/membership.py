"""Which workers there are now, as the cluster says: connects to the new, lets go of the gone.

A worker that leaves the list keeps its stream until its running requests end (it drains); a worker that comes back
as another life has its old stream closed at once, since that life is dead. Where nobody can decode, requests may wait:
for a worker that the cluster says is coming, or that was lost a moment ago.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from baton.actors.messages import WorkerInfo
from baton.router.prefix_index import PrefixIndex
from baton.router.worker_stream import Reconnect, WorkerStream


class Membership:
    """`grace_s`: how long a worker whose stream broke is expected back, whatever the cluster has said."""

    def __init__(self, index: PrefixIndex, reconnect: Reconnect, *, grace_s: float = 0.0) -> None:
        self._grace_s = grace_s
        self._index = index
        self._reconnect = reconnect
        self._streams: dict[str, WorkerStream] = {}  # by incarnation, retired ones too
        self._retirements: set[asyncio.Task[None]] = set()
        self._usable: dict[str, WorkerStream] = {}  # these and the next two follow every change: they are read often
        self._decoders: tuple[WorkerStream, ...] = ()
        self._prefillers: tuple[WorkerStream, ...] = ()
        self._max_context: int | None = None
        self._is_decoder_coming = False
        self._empty_since = time.monotonic()  # while nobody decodes
        self._changed = asyncio.Event()  # of who is usable; another one after each change
        # A worker has reported, come or gone; None: the cluster has said who is there.
        self.on_news: Callable[[WorkerStream | None], None] = lambda stream: None

    async def set_workers(self, workers: Sequence[WorkerInfo], *, is_decoder_coming: bool = False) -> None:
        """Make `workers` all there are. Raises ValueError when two share an id.

        `is_decoder_coming`: there will be another that decodes, so requests may wait for it.
        """
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
        self._is_decoder_coming = is_decoder_coming
        self._max_context = min((i.max_context for i in workers if i.role != "prefill"), default=self._max_context)
        self._sort()
        self.on_news(None)
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
        """Return the context that every decode worker can hold, or None while none has been known."""
        return self._max_context

    def why_unusable(self) -> str | None:
        """Say why no request can be served now; None if one can."""
        if self._decoders:
            return None
        if not self._known_decoders():
            return "no decode worker has registered"
        return f"none of the {len(self._known_decoders())} known decode workers is connected"

    def why_hopeless(self) -> str | None:
        """Say why no request can be served soon; None if one can, or if it is worth waiting for who comes."""
        return None if self.is_decoder_expected else self.why_unusable()

    @property
    def is_decoder_expected(self) -> bool:
        """Beside those that are usable."""
        missed = [stream.lost_at for stream in self._known_decoders() if not stream.is_connected]
        return self._is_decoder_coming or (bool(missed) and time.monotonic() - max(missed) < self._grace_s)

    @property
    def empty_s(self) -> float:
        """How long nobody has been there to decode."""
        return 0.0 if self._decoders else time.monotonic() - self._empty_since

    async def wait_change(self, timeout_s: float) -> None:
        """Return when somebody became usable or ceased to be, or the cluster has spoken, or when the time is up."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)

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
        had_decoders = bool(self._decoders)
        self._usable = {incarnation: stream for incarnation, stream in self._streams.items() if stream.is_usable}
        self._decoders = tuple(stream for stream in self._usable.values() if stream.info.role != "prefill")
        self._prefillers = tuple(stream for stream in self._usable.values() if stream.info.role == "prefill")
        if had_decoders and not self._decoders:
            self._empty_since = time.monotonic()
        self._changed.set()
        self._changed = asyncio.Event()

    def _members(self) -> list[WorkerStream]:
        return [stream for stream in self._streams.values() if not stream.is_retired]

    def _known_decoders(self) -> list[WorkerStream]:
        return [stream for stream in self._members() if stream.info.role != "prefill"]

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
