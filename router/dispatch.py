"""Sends a request to workers and relays its outputs, until it has ended once and for all.

Loses a worker, goes on with another: a request is its tokens. The load is charged before the request is sent, and
every end (finish, error, cancellation) releases it and tells the worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from baton.actors.engine.block_hash import BlockHash, block_hashes, root_hash
from baton.actors.engine.request import Request, TokenLogprobs
from baton.actors.messages import Output, Submit
from baton.router.admission import Admission, Place
from baton.router.errors import DeadlineExceeded, InvalidRequest, NoWorkers, WorkerFailed, WorkerLost
from baton.router.membership import Membership
from baton.router.policy import Candidate, Policy
from baton.router.prefix_index import PrefixIndex
from baton.router.worker_stream import Charge, Mailbox, StreamLost, WorkerStream

logger = logging.getLogger(__name__)


class GaveUp(StreamLost):
    """The worker is there, but has dropped this request."""


@dataclass(frozen=True, slots=True)
class Leg:
    """One worker's part in a request: what was charged to it. `uncached` prompt tokens are computed there."""

    stream: WorkerStream
    hashes: Sequence[BlockHash]
    uncached: int


@dataclass(frozen=True, slots=True)
class Route:
    decode: Leg
    prefill: Leg | None


class Dispatcher:
    def __init__(
        self, membership: Membership, index: PrefixIndex, policy: Policy, admission: Admission, *, max_attempts: int = 3
    ) -> None:
        self._membership = membership
        self._index = index
        self._policy = policy
        self._admission = admission
        self._max_attempts = max_attempts
        self._last_hashes = _Hashes((), "", {})

    def admit(self, requests: Sequence[Request]) -> list[Place]:
        """Take a place in the queue for each request of one call. Raises NoWorkers or Overloaded.

        Each place goes to `generate`, which leaves it; the caller must leave those that it never passes on.
        """
        reason = self._membership.why_unusable()
        if reason is not None:
            raise NoWorkers(f"{reason}: try again shortly", retry_after_s=1)
        return self._admission.enter([len(request.tokens) for request in requests])

    async def generate(self, request: Request, place: Place) -> AsyncGenerator[Output, None]:
        """Yield the request's outputs, those of one wake-up joined; closing the generator cancels it everywhere.

        Raises a RouterError instead of a last output: WorkerLost, WorkerFailed or DeadlineExceeded.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        progress = _Progress(request)
        gave_up: set[str] = set()  # lives that cancelled this request by themselves
        try:
            for attempt in range(self._max_attempts):
                current = progress.next_request(attempt, loop.time() - started)
                route = self._route(current, gave_up)
                try:
                    async with aclosing(self._attempt(current, route)) as outputs:
                        async for output in outputs:
                            if not progress.has_output:
                                place.leave()
                                self._admission.note_wait(loop.time() - started)
                            yield progress.take(output)
                    return
                except StreamLost as lost:
                    logger.warning("request %s goes on after %d tokens: %s", request.id, progress.num_tokens, lost)
                    if progress.is_complete:
                        yield Output(request_id=request.id, finish="length")
                        return
                    if isinstance(lost, GaveUp):
                        gave_up.add(route.decode.stream.incarnation)
            raise WorkerLost(
                f"{self._max_attempts} workers in turn were lost while serving this request: try again", retry_after_s=1
            )
        finally:
            place.leave()

    async def _attempt(self, request: Request, route: Route) -> AsyncGenerator[Output, None]:
        """Run the request on one decode worker. Raises StreamLost when another should go on."""
        loop = asyncio.get_running_loop()
        decode, prefill = route.decode, route.prefill
        charges = [Charge(leg.stream, leg.uncached) for leg in (decode, prefill) if leg is not None]
        deadline = None
        try:
            mailbox = decode.stream.submit(Submit(request, prefill.stream.info.peer if prefill else None))
            if request.deadline_s is not None:
                expiry = DeadlineExceeded("the request took longer than this server allows: ask for fewer tokens")
                deadline = loop.call_later(request.deadline_s, mailbox.put_nowait, expiry)
            for leg in (decode, prefill):
                if leg is not None:
                    self._index.predict(leg.stream.incarnation, leg.hashes)
            is_first = True
            while True:
                output = await _next_output(mailbox)
                if is_first:
                    is_first = False
                    charges[0].release_tokens()
                    for charge in charges[1:]:
                        charge.release()
                _raise_if_failed(output)
                yield output
                if output.finish is not None:
                    return
        finally:
            if deadline is not None:
                deadline.cancel()
            decode.stream.end(request.id)
            for charge in charges:
                charge.release()

    def _route(self, request: Request, gave_up: set[str]) -> Route:
        fresh = [stream for stream in self._membership.decoders() if stream.incarnation not in gave_up]
        if not fresh:
            raise WorkerLost("the worker was lost and no other can go on: try again", retry_after_s=1)
        decode = self._choose(fresh, request)
        prefillers = self._membership.prefillers()
        if not prefillers:
            return Route(decode, None)
        prefill = self._choose(prefillers, request)
        return Route(Leg(decode.stream, decode.hashes, 0), prefill)

    def _choose(self, streams: Sequence[WorkerStream], request: Request) -> Leg:
        hashes = {stream.info.block_size: self._hashes(request, stream.info.block_size) for stream in streams}
        candidates = [
            Candidate(
                index=i,
                matched=self._index.match(hashes[stream.info.block_size], stream.incarnation),
                num_requests=stream.num_requests,
                num_tokens=stream.num_tokens,
                num_dispatched=stream.num_dispatched,
            )
            for i, stream in enumerate(streams)
        ]
        chosen = self._policy(candidates, max(map(len, hashes.values())))
        stream = streams[chosen.index]
        uncached = len(request.tokens) - chosen.matched * stream.info.block_size
        return Leg(stream, hashes[stream.info.block_size], uncached)

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


class _Progress:
    """What the client has been given so far, and hence what is left to ask of the next worker."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._tokens: list[int] = []
        self.has_output = False

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    @property
    def is_complete(self) -> bool:
        """All tokens came, only the finish was lost with the worker."""
        return self._request.num_output + len(self._tokens) >= self._request.sampling.max_tokens

    def take(self, output: Output) -> Output:
        """Record an output; return it as the client should see it: what only a first output says is said once."""
        is_repeat = self.has_output
        self.has_output = True
        self._tokens.extend(output.tokens)
        if output.request_id == self._request.id and not is_repeat:
            return output
        cached_tokens = None if is_repeat else output.cached_tokens
        return msgspec.structs.replace(output, request_id=self._request.id, cached_tokens=cached_tokens)

    def next_request(self, attempt: int, elapsed_s: float) -> Request:
        """Return the request for one attempt: its own id, so that late outputs of an earlier one cannot be mixed up."""
        request = self._request
        if attempt == 0:
            return request
        deadline_s = None if request.deadline_s is None else max(request.deadline_s - elapsed_s, 0.0)
        return msgspec.structs.replace(
            request,
            id=f"{request.id}.{attempt}",
            tokens=request.tokens + tuple(self._tokens),
            num_output=request.num_output + len(self._tokens),
            deadline_s=deadline_s,
        )


async def _next_output(mailbox: Mailbox) -> Output:
    """Wait for news, and join what came with it. Outputs before an exception are delivered first."""
    outputs = [_unwrap(await mailbox.get())]
    while not mailbox.empty():
        item = mailbox.get_nowait()
        if isinstance(item, Exception):
            mailbox.put_nowait(item)
            break
        outputs.append(item)
    return outputs[0] if len(outputs) == 1 else _joined(outputs)


def _unwrap(item: Output | Exception) -> Output:
    if isinstance(item, Exception):
        raise item
    return item


def _joined(outputs: Sequence[Output]) -> Output:
    """Join consecutive outputs of one request."""
    first, last = outputs[0], outputs[-1]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    if first.logprobs is not None:
        logprobs = tuple(entry for output in outputs for entry in output.logprobs or ())
    return Output(
        request_id=first.request_id,
        tokens=tuple(token for output in outputs for token in output.tokens),
        logprobs=logprobs,
        cached_tokens=first.cached_tokens,
        finish=last.finish,
        error=last.error,
        served=last.served,
    )


def _raise_if_failed(output: Output) -> None:
    if output.is_refusal:
        raise InvalidRequest(f"the structured output cannot be honoured: {output.error}", param="response_format")
    if output.finish == "error":
        raise WorkerFailed(f"the worker failed: {output.error or 'no reason given'}")
    if output.finish == "cancelled":
        raise GaveUp("the worker cancelled it by itself")
