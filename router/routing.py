"""Which workers serve a request: reads what is known of the workers and their caches, and asks the policy.

Synchronous, without a clock of its own and without I/O: the gateway and the simulator run this same code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import inf
from typing import Generic, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from baton.actors.engine.block_hash import BlockHash, block_hashes, root_hash
from baton.actors.engine.request import Request
from baton.router.errors import WorkerLost
from baton.router.fleet import NUM_FIGURES, Column, Pool, Roster, RoutedWorker
from baton.router.policy import EXPECTED_OUTPUT, Ask, Policy
from baton.router.prefix_index import PrefixIndex
from baton.router.slo import SloTargets

NO_TARGETS = SloTargets()
OUTPUT_SMOOTHING = 0.02

NOBODY = Pool((), np.empty((NUM_FIGURES, 0)), np.empty(0))

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
    context: float = 0.0  # sum over these of the positions that each attends to
    kv_tokens: int = 0  # that the request is expected to hold while it decodes there


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
        self._decode.begin_decoding()
        if self._prefill is not None:
            self._prefill.release()

    def release(self) -> None:
        self._decode.release()
        if self._prefill is not None:
            self._prefill.release()


class _Weight:
    """One request's weight on one worker."""

    def __init__(self, leg: Leg[RoutedWorker]) -> None:
        self._leg = leg
        self._is_prefilled = self._is_released = False
        self._tally = leg.worker.charge(leg.uncached, leg.context)
        leg.worker.own_kv_tokens += leg.kv_tokens
        leg.worker.num_own_decodes += leg.kv_tokens > 0
        self._is_decoding = False
        leg.worker.refresh()

    def release_prefill(self) -> None:
        if self._is_prefilled:
            return
        self._is_prefilled = True
        leg = self._leg
        leg.worker.num_own_tokens -= leg.uncached
        leg.worker.num_own_prefills -= leg.uncached > 0
        self._tally.num_tokens -= leg.uncached
        self._tally.context -= leg.context
        leg.worker.refresh()

    def begin_decoding(self) -> None:
        if not (self._is_decoding or self._is_released):
            self._is_decoding = True
            self._leg.worker.num_own_decoding += 1
            self._leg.worker.refresh()

    def release(self) -> None:
        self.release_prefill()
        if self._is_released:
            return
        self._is_released = True
        worker = self._leg.worker
        worker.num_own_decodes -= self._leg.kv_tokens > 0
        worker.num_own_decoding -= self._is_decoding
        worker.num_own_requests -= 1
        worker.own_kv_tokens -= self._leg.kv_tokens
        self._tally.num_requests -= 1
        worker.refresh()


def hash_prompt(request: Request, block_size: int) -> Sequence[BlockHash]:
    return block_hashes(request.tokens, block_size, root_hash(request.cache_salt))


class Router(Generic[W]):
    def __init__(
        self,
        workers: Workers[W],
        index: PrefixIndex,
        policy: Policy,
        hash_prompt: Callable[[Request, int], Sequence[BlockHash]] = hash_prompt,
    ) -> None:
        self._workers = workers
        self._index = index
        self._policy = policy
        self._hash_prompt = hash_prompt
        self._num_decisions = 0
        self._output_len = EXPECTED_OUTPUT  # mean of the requests that ended lately
        self._num_ended = 0
        self._targets = NO_TARGETS  # of the last request that was routed: those who wait are taken to be alike
        self._last_prompt: _Prompt[W] | None = None
        self._rosters: tuple[Roster[W], ...] = ()  # of the two pools, as they are now

    def route(
        self, request: Request, without: Collection[str] = (), *, targets: SloTargets = NO_TARGETS, session: str = ""
    ) -> Route[W]:
        """Choose who decodes, and who prefills if that is another. Raises WorkerLost when no decode worker is left.

        `without`: incarnations that must not decode it. Requests of one `session` like to meet again.
        """
        prompt = self._prompt(request)
        decoders = self._pool(self._workers.decoders(), prompt, without)
        if not len(decoders):
            raise WorkerLost("the worker was lost and no other can go on: try again", retry_after_s=1)
        is_whole = request.prompt is not None  # what is asked of the prompt itself is computed in one place
        prefillers = self._pool(() if is_whole else self._workers.prefillers(), prompt)
        self._num_decisions += 1
        self._targets = targets
        ask = self._ask(len(request.tokens), session, is_whole=is_whole)
        choice = self._policy(ask, decoders, prefillers)
        kv_tokens = len(request.tokens) + int(ask.output_len / 2)
        decode = cast(W, decoders.workers[choice.decode])
        source = decoders if choice.is_peer else prefillers
        if choice.prefill is None or source.workers[choice.prefill].info.version != decode.info.version:
            return Route(prompt.leg(decoders, choice.decode, kv_tokens), None, choice.ttft_ms)
        decode_leg = Leg(decode, prompt.hashes(decode.info.block_size), 0, kv_tokens=kv_tokens)
        return Route(decode_leg, prompt.leg(source, choice.prefill, 0), choice.ttft_ms)

    def has_room(self, num_tokens: int) -> bool:
        """Whether a prompt of so many tokens would start soon, so that it need not wait where its turn can be decided.

        Where only some have room, it must be where the policy would send it.
        """
        decoders, prefillers = self._coldly(self._workers.decoders()), self._coldly(self._workers.prefillers())
        rooms = np.concatenate((decoders.has_room, prefillers.has_room))
        if rooms.all() or not rooms.any():
            return bool(rooms.any())
        choice = self._policy(self._ask(num_tokens), decoders, prefillers)
        if choice.prefill is None:
            return bool(decoders.has_room[choice.decode])
        room = (decoders if choice.is_peer else prefillers).has_room[choice.prefill]
        return bool(room and decoders.has_seat[choice.decode])

    def has_seat(self) -> bool:
        """Whether any worker could decode one more sequence."""
        return bool(self._coldly(self._workers.decoders()).has_seat.any())

    def charge(self, route: Route[RoutedWorker]) -> Charge:
        """Count the request as there, and its prefix as held there for a while: it is about to be sent."""
        for leg in route.legs:
            self._index.predict(leg.worker.incarnation, leg.hashes)
        return Charge(route)

    def _ask(self, prompt_len: int, session: str = "", *, is_whole: bool = False) -> Ask:
        targets = self._targets
        return Ask(
            prompt_len=prompt_len,
            number=self._num_decisions,
            session=session,
            is_whole=is_whole,
            output_len=self._output_len,
            ttft_ms=inf if targets.ttft_s is None else 1e3 * targets.ttft_s,
            itl_ms=inf if targets.itl_s is None else 1e3 * targets.itl_s,
        )

    def note_end(self, num_output: int) -> None:
        """Learn from a request that has ended how long outputs are."""
        self._num_ended += 1
        self._output_len += max(OUTPUT_SMOOTHING, 1 / (1 + self._num_ended)) * (max(num_output, 1) - self._output_len)

    def _pool(self, workers: Sequence[W], prompt: _Prompt[W], without: Collection[str] = ()) -> Pool:
        if not workers:
            return NOBODY
        roster = self._roster(workers)
        pool = Pool(workers, roster.figures, prompt.cached(roster))
        if not without:
            return pool
        rows = [row for row, worker in enumerate(workers) if worker.incarnation not in without]
        return Pool([workers[row] for row in rows], pool.figures[:, rows], pool.cached[rows])

    def _coldly(self, workers: Sequence[W]) -> Pool:
        """Look at the workers as if no cache held anything."""
        return Pool(workers, self._roster(workers).figures, np.zeros(len(workers)))

    def _roster(self, workers: Sequence[W]) -> Roster[W]:
        """Make a roster of each pool once; a pool that changes is another sequence."""
        for roster in self._rosters:
            if roster.workers is workers:
                return roster
        roster = Roster(workers)
        self._rosters = (roster, *self._rosters[:1])
        return roster

    def _prompt(self, request: Request) -> _Prompt[W]:
        """Share the hashes among all choices of one prompt (they share the tuple)."""
        last = self._last_prompt
        by_size: dict[int, Sequence[BlockHash]] = {}
        if last is not None and last.request.tokens is request.tokens and last.request.cache_salt == request.cache_salt:
            by_size = last.by_size
        self._last_prompt = _Prompt(request, self._index, self._hash_prompt, by_size)
        return self._last_prompt


class _Prompt(Generic[W]):
    """One request's prompt, as block hashes and as what the workers hold of it; each made when first asked for."""

    def __init__(
        self,
        request: Request,
        index: PrefixIndex,
        hash_prompt: Callable[[Request, int], Sequence[BlockHash]],
        by_size: dict[int, Sequence[BlockHash]],
    ) -> None:
        self.request = request
        self.by_size = by_size
        self._index = index
        self._hash_prompt = hash_prompt
        self._matched: dict[int, NDArray[np.int32]] = {}

    def hashes(self, block_size: int) -> Sequence[BlockHash]:
        if block_size not in self.by_size:
            self.by_size[block_size] = self._hash_prompt(self.request, block_size)
        return self.by_size[block_size]

    def cached(self, roster: Roster[W]) -> Column:
        """Count the leading tokens that each worker of the roster holds."""
        sizes, slots = roster.block_sizes, self._index.slots(roster.incarnations)
        cached = np.zeros(len(slots))
        for size in roster.distinct_sizes:
            if size not in self._matched:
                self._matched[size] = self._index.match_slots(self.hashes(size))
            blocks = self._matched[size][slots]
            cached += float(size) * (blocks if len(roster.distinct_sizes) == 1 else blocks * (sizes == size))
        return cached

    def leg(self, pool: Pool, row: int, kv_tokens: int) -> Leg[W]:
        """Make the leg of the worker that computes the prompt."""
        worker = cast(W, pool.workers[row])
        num_tokens = len(self.request.tokens)
        cached = min(int(pool.cached[row]), num_tokens - 1)
        uncached = num_tokens - cached
        context = uncached * (cached + 0.5 * uncached)
        return Leg(worker, self.hashes(worker.info.block_size), uncached, context, kv_tokens)
