"""Which workers serve a request: reads what is known of the workers and their caches, and asks the policy.

Synchronous, without a clock of its own and without I/O: the gateway and the simulator run this same code.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from baton.actors.engine.block_hash import BlockHash, block_hashes, root_hash
from baton.actors.engine.request import Request
from baton.actors.messages import Load, WorkerInfo
from baton.router.errors import WorkerLost
from baton.router.policy import Candidate, Policy
from baton.router.prefix_index import PrefixIndex

SPARE_SEQUENCES = 4  # that may wait on a worker for a seat
MIN_AVAILABLE = 0.05  # share of a worker's blocks, free or cached, below which what runs there needs them itself


@dataclass(slots=True)
class Tally:
    num_requests: int = 0
    num_tokens: int = 0


class RoutedWorker:
    """What the router knows of one life of a worker: what it says of itself, and what this gateway has sent it."""

    def __init__(self, info: WorkerInfo) -> None:
        self.info = info
        self.load = Load()
        self.num_own_requests = 0  # this gateway's, charged before they are sent
        self.num_own_tokens = 0
        self.num_dispatched = 0
        # Charged after the last report, and between the last two. A worker counts what it had when a step began, and
        # a request for a prefill worker comes by way of another: only the second report after it surely counts it.
        self._fresh = Tally()
        self._recent = Tally()

    @property
    def incarnation(self) -> str:
        return self.info.peer.incarnation

    @property
    def num_requests(self) -> int:
        """Everybody's requests there: as last reported, and this gateway's that cannot be in the report yet."""
        load = self.load
        num_reported = load.num_running + load.num_waiting + load.num_importing
        return num_reported + self._fresh.num_requests + self._recent.num_requests

    @property
    def num_tokens(self) -> int:
        """Uncached prompt tokens that it has yet to compute, in the same sense."""
        return self.load.waiting_tokens + self._fresh.num_tokens + self._recent.num_tokens

    @property
    def has_room(self) -> bool:
        """Whether another request would start soon, so that it need not wait where its turn can still be decided.

        A worker always has work for two steps, and a few sequences for seats that come free.
        """
        info, load = self.info, self.load
        num_requests = self.num_requests
        num_available = load.blocks_free + load.blocks_cached
        return num_requests == 0 or (
            num_requests < info.max_sequences + SPARE_SEQUENCES
            and self.num_tokens < 2 * info.step_tokens
            and load.num_waiting < SPARE_SEQUENCES
            and (num_available + load.blocks_held == 0 or num_available > MIN_AVAILABLE * info.num_blocks)
        )

    def take_load(self, load: Load) -> None:
        self.load = load
        self._recent, self._fresh = self._fresh, Tally()

    def charge(self, num_tokens: int) -> Tally:
        """Count one request more. What is released before a report can count it must come off the returned tally."""
        self.num_own_requests += 1
        self.num_own_tokens += num_tokens
        self.num_dispatched += 1
        self._fresh.num_requests += 1
        self._fresh.num_tokens += num_tokens
        return self._fresh


W = TypeVar("W", bound=RoutedWorker)
W_co = TypeVar("W_co", bound=RoutedWorker, covariant=True)


class Workers(Protocol[W_co]):
    """The workers that can take a request now."""

    def decoders(self) -> Sequence[W_co]: ...

    def prefillers(self) -> Sequence[W_co]: ...


@dataclass(frozen=True, slots=True)
class Leg(Generic[W_co]):
    """One worker's part in a request: what will be charged to it. `uncached` prompt tokens are computed there."""

    worker: W_co
    hashes: Sequence[BlockHash]
    uncached: int


@dataclass(frozen=True, slots=True)
class Route(Generic[W_co]):
    decode: Leg[W_co]
    prefill: Leg[W_co] | None

    @property
    def legs(self) -> Sequence[Leg[W_co]]:
        return (self.decode,) if self.prefill is None else (self.decode, self.prefill)


class Charge:
    """A request's weight on the workers of its route, from before it is sent until it ends. Releases are idempotent."""

    def __init__(self, route: Route[RoutedWorker]) -> None:
        self._decode = _Weight(route.decode)
        self._prefill = None if route.prefill is None else _Weight(route.prefill)

    def on_first_token(self) -> None:
        """The prompt is computed: what is left is to decode."""
        self._decode.release_tokens()
        if self._prefill is not None:
            self._prefill.release()

    def release(self) -> None:
        self.on_first_token()
        self._decode.release()


class Router(Generic[W]):
    def __init__(self, workers: Workers[W], index: PrefixIndex, policy: Policy) -> None:
        self._workers = workers
        self._index = index
        self._policy = policy
        self._last_hashes = _Hashes((), "", {})

    def route(self, request: Request, without: Collection[str] = ()) -> Route[W]:
        """Choose who decodes, and who prefills if that is another. Raises WorkerLost when no decode worker is left.

        `without`: incarnations that must not decode it.
        """
        fresh = [worker for worker in self._workers.decoders() if worker.incarnation not in without]
        if not fresh:
            raise WorkerLost("the worker was lost and no other can go on: try again", retry_after_s=1)
        decode = self._choose(fresh, request)
        prefillers = self._workers.prefillers()
        if not prefillers:
            return Route(decode, None)
        return Route(Leg(decode.worker, decode.hashes, 0), self._choose(prefillers, request))

    def charge(self, route: Route[RoutedWorker]) -> Charge:
        """Count the request as there, and its prefix as held there for a while: it is about to be sent."""
        for leg in route.legs:
            self._index.predict(leg.worker.incarnation, leg.hashes)
        return Charge(route)

    def _choose(self, workers: Sequence[W], request: Request) -> Leg[W]:
        hashes = {worker.info.block_size: self._hashes(request, worker.info.block_size) for worker in workers}
        candidates = [
            Candidate(
                index=i,
                matched=self._index.match(hashes[worker.info.block_size], worker.incarnation),
                num_requests=worker.num_requests,
                num_tokens=worker.num_tokens,
                num_dispatched=worker.num_dispatched,
            )
            for i, worker in enumerate(workers)
        ]
        chosen = self._policy(candidates, max(map(len, hashes.values())))
        worker = workers[chosen.index]
        uncached = len(request.tokens) - chosen.matched * worker.info.block_size
        return Leg(worker, hashes[worker.info.block_size], uncached)

    def _hashes(self, request: Request, block_size: int) -> Sequence[BlockHash]:
        """Hash the prompt's blocks, once for all choices of one prompt (they share the tuple)."""
        last = self._last_hashes
        if last.tokens is not request.tokens or last.salt != request.cache_salt:
            last = self._last_hashes = _Hashes(request.tokens, request.cache_salt, {})
        if block_size not in last.by_size:
            last.by_size[block_size] = block_hashes(request.tokens, block_size, root_hash(request.cache_salt))
        return last.by_size[block_size]


class _Weight:
    """One request's weight on one worker."""

    def __init__(self, leg: Leg[RoutedWorker]) -> None:
        self._worker = leg.worker
        self._num_requests = 1
        self._num_tokens = leg.uncached
        self._tally = leg.worker.charge(leg.uncached)

    def release_tokens(self) -> None:
        self._worker.num_own_tokens -= self._num_tokens
        self._tally.num_tokens -= self._num_tokens
        self._num_tokens = 0

    def release(self) -> None:
        self.release_tokens()
        self._worker.num_own_requests -= self._num_requests
        self._tally.num_requests -= self._num_requests
        self._num_requests = 0


@dataclass(frozen=True, slots=True)
class _Hashes:
    tokens: tuple[int, ...]
    salt: str
    by_size: dict[int, Sequence[BlockHash]]
