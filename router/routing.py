"""Which workers serve a request: reads what is known of the workers and their caches, and asks the policy.

Synchronous, without a clock of its own and without I/O: the gateway and the simulator run this same code.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf
from typing import Generic, Protocol, TypeVar

from baton.actors.engine.block_hash import BlockHash, block_hashes, root_hash
from baton.actors.engine.request import Request
from baton.router.errors import WorkerLost
from baton.router.fleet import Pool, RoutedWorker
from baton.router.policy import Ask, Policy
from baton.router.prefix_index import PrefixIndex
from baton.router.slo import SloTargets

NO_TARGETS = SloTargets()

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
        if self._prefill is not None:
            self._prefill.release()

    def release(self) -> None:
        self.on_first_token()
        self._decode.release()


class _Weight:
    """One request's weight on one worker."""

    def __init__(self, leg: Leg[RoutedWorker]) -> None:
        self._leg = leg
        self._is_prefilled = self._is_released = False
        self._tally = leg.worker.charge(leg.uncached, leg.context)
        leg.worker.own_kv_tokens += leg.kv_tokens

    def release_prefill(self) -> None:
        if self._is_prefilled:
            return
        self._is_prefilled = True
        leg = self._leg
        leg.worker.num_own_tokens -= leg.uncached
        leg.worker.num_own_prefills -= leg.uncached > 0
        self._tally.num_tokens -= leg.uncached
        self._tally.context -= leg.context

    def release(self) -> None:
        self.release_prefill()
        if self._is_released:
            return
        self._is_released = True
        worker = self._leg.worker
        worker.num_own_requests -= 1
        worker.own_kv_tokens -= self._leg.kv_tokens
        self._tally.num_requests -= 1


class Router(Generic[W]):
    def __init__(self, workers: Workers[W], index: PrefixIndex, policy: Policy) -> None:
        self._workers = workers
        self._index = index
        self._policy = policy
        self._num_decisions = 0
        self._last_prompt: _Prompt | None = None

    def route(
        self, request: Request, without: Collection[str] = (), *, targets: SloTargets = NO_TARGETS, session: str = ""
    ) -> Route[W]:
        """Choose who decodes, and who prefills if that is another. Raises WorkerLost when no decode worker is left.

        `without`: incarnations that must not decode it. Requests of one `session` like to meet again.
        """
        decoders = [worker for worker in self._workers.decoders() if worker.incarnation not in without]
        if not decoders:
            raise WorkerLost("the worker was lost and no other can go on: try again", retry_after_s=1)
        prefillers = self._workers.prefillers()
        self._num_decisions += 1
        ask = Ask(
            prompt_len=len(request.tokens),
            number=self._num_decisions,
            session=session,
            ttft_ms=inf if targets.ttft_s is None else 1e3 * targets.ttft_s,
            itl_ms=inf if targets.itl_s is None else 1e3 * targets.itl_s,
        )
        prompt = self._prompt(request)
        choice = self._policy(ask, Pool(decoders, prompt.matched), Pool(prefillers, prompt.matched))
        decode = decoders[choice.decode]
        kv_tokens = len(request.tokens) + int(ask.output_len / 2)
        if choice.prefill is None:
            return Route(prompt.leg(decode, kv_tokens), None, choice.ttft_ms)
        decode_leg = Leg(decode, prompt.hashes(decode.info.block_size), 0, kv_tokens=kv_tokens)
        return Route(decode_leg, prompt.leg(prefillers[choice.prefill], 0), choice.ttft_ms)

    def has_room(self, num_tokens: int) -> bool:
        """Whether a prompt of so many tokens would start soon, so that it need not wait where its turn can be decided.

        Where every prefill worker is busy, only one that the policy would prefill where it decodes.
        """
        decoders, prefillers = self._workers.decoders(), self._workers.prefillers()
        if not any(worker.has_room for worker in decoders):
            return False
        if not prefillers or any(worker.has_room for worker in prefillers):
            return True
        choice = self._policy(Ask(num_tokens), Pool(decoders, _nothing), Pool(prefillers, _nothing))
        return choice.prefill is None and decoders[choice.decode].has_room

    def charge(self, route: Route[RoutedWorker]) -> Charge:
        """Count the request as there, and its prefix as held there for a while: it is about to be sent."""
        for leg in route.legs:
            self._index.predict(leg.worker.incarnation, leg.hashes)
        return Charge(route)

    def _prompt(self, request: Request) -> _Prompt:
        """Share the hashes among all choices of one prompt (they share the tuple)."""
        last = self._last_prompt
        by_size: dict[int, Sequence[BlockHash]] = {}
        if last is not None and last.request.tokens is request.tokens and last.request.cache_salt == request.cache_salt:
            by_size = last.by_size
        self._last_prompt = _Prompt(request, self._index, by_size)
        return self._last_prompt


def _nothing(block_size: int) -> dict[str, int]:
    """Match no cache."""
    return {}


class _Prompt:
    """One request's prompt, as block hashes and as what the workers hold of it; each made when first asked for."""

    def __init__(self, request: Request, index: PrefixIndex, by_size: dict[int, Sequence[BlockHash]]) -> None:
        self.request = request
        self.by_size = by_size
        self._index = index
        self._matched: dict[int, dict[str, int]] = {}

    def hashes(self, block_size: int) -> Sequence[BlockHash]:
        if block_size not in self.by_size:
            root = root_hash(self.request.cache_salt)
            self.by_size[block_size] = block_hashes(self.request.tokens, block_size, root)
        return self.by_size[block_size]

    def matched(self, block_size: int) -> dict[str, int]:
        """Count the leading blocks that each incarnation holds, where it holds any."""
        if block_size not in self._matched:
            self._matched[block_size] = self._index.match_all(self.hashes(block_size))
        return self._matched[block_size]

    def leg(self, worker: W, kv_tokens: int) -> Leg[W]:
        """Make the leg of the worker that computes the prompt."""
        block_size, num_tokens = worker.info.block_size, len(self.request.tokens)
        cached = min(block_size * self.matched(block_size).get(worker.incarnation, 0), num_tokens - 1)
        uncached = num_tokens - cached
        context = uncached * (cached + 0.5 * uncached)
        return Leg(worker, self.hashes(block_size), uncached, context, kv_tokens)
