"""Sends a request to workers and relays its outputs, until it has ended once and for all.

Loses a worker, goes on with another: a request is its tokens. The load is charged before the request is sent, and
every end (finish, error, cancellation) releases it and tells the worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from baton.actors.engine.request import Request, TokenLogprobs
from baton.actors.messages import Output, Submit
from baton.actors.spans import NoSpans, Spans
from baton.router.admission import Admission, AdmissionLimits, Place
from baton.router.errors import DeadlineExceeded, InvalidRequest, NoWorkers, Overloaded, WorkerFailed, WorkerLost
from baton.router.membership import Membership
from baton.router.metrics import Metrics
from baton.router.routing import Charge, Route, Router
from baton.router.slo import Terms
from baton.router.worker_stream import Mailbox, StreamLost, WorkerStream

logger = logging.getLogger(__name__)

RETRY_S = 1.0  # between two looks for a worker, while none comes or goes


class GaveUp(StreamLost):
    """The worker is there, but has dropped this request: it drains."""


class Dispatcher:
    spans: Spans = NoSpans()

    def __init__(
        self,
        membership: Membership,
        router: Router[WorkerStream],
        limits: AdmissionLimits,
        metrics: Metrics,
        *,
        max_attempts: int = 3,
    ) -> None:
        self._membership = membership
        self._router = router
        self._max_attempts = max_attempts
        self._max_wait_s = limits.max_wait_s
        self._metrics = metrics
        self.admission = Admission(limits, router.has_room, has_seat=router.has_seat)
        metrics.watch_queue(lambda: self.admission.num_queued, lambda: self.admission.num_queued_tokens)
        membership.on_news = self._on_news

    def admit(self, requests: Sequence[Request], terms: Terms) -> list[Place]:
        """Take a place in the queue for each request of one call. Raises NoWorkers or Overloaded.

        Each place goes to `generate`, which leaves it; the caller must leave those that it never passes on.
        """
        reason = self._membership.why_hopeless()
        if reason is not None:
            raise _no_workers(reason)
        lens = [len(request.tokens) for request in requests]
        deadlines = [seconds for seconds in (requests[0].deadline_s, terms.slo.ttft_s) if seconds is not None]
        deadline_s = min(deadlines, default=None)
        return self.admission.enter(lens, key=terms.key, priority=requests[0].priority, deadline_s=deadline_s)

    async def generate(self, request: Request, place: Place, terms: Terms) -> AsyncGenerator[Output, None]:
        """Yield the request's outputs, those of one wake-up joined; closing the generator cancels it everywhere.

        Raises a RouterError instead of a last output: Overloaded or NoWorkers while it waits for its turn, WorkerLost,
        WorkerFailed or DeadlineExceeded then.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        progress = _Progress(request)
        gave_up: set[str] = set()  # lives that cancelled this request by themselves
        num_lost = 0
        try:
            await self._turn(place)
            turn = loop.time()
            self._metrics.queued(turn - started)
            self.spans.record("queue", request.trace, place.since, turn)
            while num_lost < self._max_attempts:
                current = progress.next_request(num_lost + len(gave_up), loop.time() - started)
                route = await self._route(current, gave_up, terms)
                charge = self._router.charge(route)
                place.charged(sum(leg.uncached for leg in route.legs))
                try:
                    async with aclosing(self._attempt(current, route, charge)) as outputs:
                        async for output in outputs:
                            place.leave(has_output=True)
                            if not progress.has_output:
                                self.spans.record("first token", request.trace, turn, loop.time())
                            yield progress.take(output)
                    return
                except GaveUp as gone:
                    _log_move(request, progress, gone)
                    gave_up.add(route.decode.worker.incarnation)
                    self._metrics.migrated("handed_back")
                except StreamLost as lost:
                    _log_move(request, progress, lost)
                    num_lost += 1
                    self._metrics.migrated("lost")
                finally:
                    charge.release()
                if progress.is_complete:
                    yield Output(request_id=request.id, finish="length")
                    return
            raise WorkerLost(
                f"{num_lost} workers in turn were lost while serving this request: try again", retry_after_s=1
            )
        finally:
            place.leave()
            self.admission.note_end(place, progress.num_tokens)
            if progress.num_tokens:
                self._router.note_end(progress.num_tokens)

    async def _turn(self, place: Place) -> None:
        try:
            await place.wait()
        except Overloaded:
            reason = self._membership.why_unusable()
            if reason is not None:  # it waited for a worker that has not come in time
                raise _no_workers(reason) from None
            raise

    async def _route(self, request: Request, gave_up: set[str], terms: Terms) -> Route[WorkerStream]:
        """Choose the workers; where none is left to decode, wait for one that is coming as long as for a turn."""
        deadline = time.monotonic() + self._max_wait_s
        while True:
            started = time.perf_counter()
            try:
                route = self._router.route(request, gave_up, targets=terms.slo, session=terms.session)
            except WorkerLost:
                if time.monotonic() > deadline or not self._membership.is_decoder_expected:
                    raise
                await self._membership.wait_change(RETRY_S)
            else:
                self._metrics.routed(time.perf_counter() - started, is_disaggregated=route.prefill is not None)
                return route

    def _on_news(self, stream: WorkerStream | None) -> None:
        """A worker has reported, come or gone: perhaps somebody who waits can go, or nobody can any more."""
        if not self.admission.num_queued:
            return
        reason = self._membership.why_hopeless()
        if reason is not None:
            self.admission.refuse_all(_no_workers(reason))
            return
        if self.admission.wants_progress():
            decoders, prefillers = self._membership.decoders(), self._membership.prefillers()
            outstanding = sum(worker.num_tokens for worker in (*decoders, *prefillers))
            self.admission.note_progress(outstanding)
        if stream is None or stream.has_room:
            self.admission.pump()

    async def _attempt(
        self, request: Request, route: Route[WorkerStream], charge: Charge
    ) -> AsyncGenerator[Output, None]:
        """Run the request on one decode worker. Raises StreamLost when another should go on."""
        loop = asyncio.get_running_loop()
        stream, prefill = route.decode.worker, route.prefill
        deadline, sent_at = None, loop.time()
        try:
            mailbox = stream.submit(Submit(request, prefill.worker.info.peer if prefill else None))
            if request.deadline_s is not None:
                expiry = DeadlineExceeded("the request took longer than this server allows: ask for fewer tokens")
                deadline = loop.call_later(request.deadline_s, mailbox.put_nowait, expiry)
            is_first = True
            while True:
                output = await _next_output(mailbox)
                if is_first:
                    is_first = False
                    charge.on_first_token()
                    self._metrics.predicted(route.ttft_ms, loop.time() - sent_at)
                _raise_if_failed(output)
                yield output
                if output.finish is not None:
                    return
        finally:
            if deadline is not None:
                deadline.cancel()
            stream.end(request.id)


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
        deadline_s = None if request.deadline_s is None else max(request.deadline_s - elapsed_s, 0.0)
        if attempt == 0:
            return msgspec.structs.replace(request, deadline_s=deadline_s)
        return msgspec.structs.replace(
            request,
            id=f"{request.id}.{attempt}",
            tokens=request.tokens + tuple(self._tokens),
            num_output=request.num_output + len(self._tokens),
            deadline_s=deadline_s,
        )


def _no_workers(reason: str) -> NoWorkers:
    return NoWorkers(f"{reason}: try again shortly", retry_after_s=1)


def _log_move(request: Request, progress: _Progress, reason: StreamLost) -> None:
    level = logging.INFO if isinstance(reason, GaveUp) else logging.WARNING
    extra = {"request_id": request.id, "trace": request.trace}
    logger.log(level, "goes on elsewhere after %d tokens: %s", progress.num_tokens, reason, extra=extra)


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
