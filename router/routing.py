"""Which workers serve a request: reads what is known of the workers and their caches, and asks the policy.

Synchronous, without a clock of its own and without I/O: the gateway and the simulator run this same code.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from baton.actors.engine.block_hash import BlockHash, block_hashes, root_hash
from baton.actors.engine.request import Request
from baton.router.errors import WorkerLost
from baton.router.fleet import Pool, RoutedWorker
from baton.router.policy import Ask, Policy
from baton.router.prefix_index import PrefixIndex

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
    prefill_ms: float = 0.0  # predicted for them
    kv_tokens: int = 0  # that it keeps while the request decodes there


@dataclass(frozen=True, slots=True)
class Route(Generic[W_co]):
    decode: Leg[W_co]
    prefill: Leg[W_co] | None
    ttft_ms: float | None = None  # predicted

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
        self._decode.release_prefill()
        if self._prefill is not None:
            self._prefill.release()

    def release(self) -> None:
        self.on_first_token()
        self._decode.release()


class _Weight:
    """One request's weight on one worker."""

    def __init__(self, leg: Leg[RoutedWorker]) -> None:
        self._worker: RoutedWorker | None = leg.worker
        self._leg: Leg[RoutedWorker] | None = leg
        worker = leg.worker
        worker.num_own_requests += 1
        worker.num_own_tokens += leg.uncached
        worker.num_own_prefills += leg.uncached > 0
        worker.own_prefill_ms += leg.prefill_ms
        worker.own_kv_tokens += leg.kv_tokens
        worker.num_dispatched += 1
        self._kv_tokens = leg.kv_tokens

    def release_prefill(self) -> None:
        leg, self._leg = self._leg, None
        if leg is not None:
            worker = leg.worker
            worker.num_own_tokens -= leg.uncached
            worker.num_own_prefills -= leg.uncached > 0
            worker.own_prefill_ms -= leg.prefill_ms

    def release(self) -> None:
        self.release_prefill()
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.num_own_requests -= 1
            worker.own_kv_tokens -= self._kv_tokens


class Router(Generic[W]):
    def __init__(self, workers: Workers[W], index: PrefixIndex, policy: Policy) -> None:
        self._workers = workers
        self._index = index
        self._policy = policy
        self._num_decisions = 0
        self._last_hashes = _Hashes((), "", {})

    def route(self, request: Request, without: Collection[str] = ()) -> Route[W]:
        """Choose who decodes, and who prefills if that is another. Raises WorkerLost when no decode worker is left.

        `without`: incarnations that must not decode it.
        """
        decoders = [worker for worker in self._workers.decoders() if worker.incarnation not in without]
        if not decoders:
            raise WorkerLost("the worker was lost and no other can go on: try again", retry_after_s=1)
        prefillers = self._workers.prefillers()
        self._num_decisions += 1
        ask = Ask(len(request.tokens), number=self._num_decisions)
        choice = self._policy(
            ask, self._pool(request, decoders), self._pool(request, prefillers) if prefillers else None
        )
        decode = decoders[choice.decode]
        prefill = None if choice.prefill is None else prefillers[choice.prefill]
        kv_tokens = len(request.tokens) + int(ask.output_len / 2)
        if prefill is None:
            return Route(self._leg(request, decode, computes=True, kv_tokens=kv_tokens), None, choice.ttft_ms)
        return Route(
            self._leg(request, decode, computes=False, kv_tokens=kv_tokens),
            self._leg(request, prefill, computes=True, kv_tokens=0),
            choice.ttft_ms,
        )

    def charge(self, route: Route[RoutedWorker]) -> Charge:
        """Count the request as there, and its prefix as held there for a while: it is about to be sent."""
        for leg in route.legs:
            self._index.predict(leg.worker.incarnation, leg.hashes)
        return Charge(route)

    def _pool(self, request: Request, workers: Sequence[W]) -> Pool:
        return Pool(workers, lambda worker: self._match(request, worker))

    def _match(self, request: Request, worker: RoutedWorker) -> int:
        """Count the leading tokens that the worker holds."""
        block_size = worker.info.block_size
        return block_size * self._index.match(self._hashes(request, block_size), worker.incarnation)

    def _leg(self, request: Request, worker: W, *, computes: bool, kv_tokens: int) -> Leg[W]:
        hashes = self._hashes(request, worker.info.block_size)
        if not computes:
            return Leg(worker, hashes, 0, kv_tokens=kv_tokens)
        cached = min(self._match(request, worker), len(request.tokens) - 1)
        uncached = len(request.tokens) - cached
        return Leg(worker, hashes, uncached, worker.cost.prefill_ms(uncached, cached), kv_tokens)

    def _hashes(self, request: Request, block_size: int) -> Sequence[BlockHash]:
        """Hash the prompt's blocks, once for all choices of one prompt (they share the tuple)."""
        last = self._last_hashes
        if last.tokens is not request.tokens or last.salt != request.cache_salt:
            last = self._last_hashes = _Hashes(request.tokens, request.cache_salt, {})
        if block_size not in last.by_size:
            last.by_size[block_size] = block_hashes(request.tokens, block_size, root_hash(request.cache_salt))
        return last.by_size[block_size]


@dataclass(frozen=True, slots=True)
class _Hashes:
    tokens: tuple[int, ...]
    salt: str
    by_size: dict[int, Sequence[BlockHash]]
