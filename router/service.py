"""One generation call from its body to its last byte, for both endpoints: parse, plan, generate, answer, account.

Knows HTTP requests and responses; routes and the process's life are gateway.py's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from baton.router.config import RouterConfig
from baton.router.dispatch import Dispatcher
from baton.router.errors import ModelNotFound, NoWorkers, RouterError
from baton.router.formats import ChatFormat, CompletionFormat, ReplyWriter, error_event
from baton.router.generation import Choice, Delta, Generation
from baton.router.http_io import (
    CLIENT_CLOSED,
    EventStream,
    error_response,
    json_response,
    read_body,
    reply_headers,
    while_connected,
)
from baton.router.membership import Membership
from baton.router.metrics import Metrics
from baton.router.openai_models import ChatRequest, CompletionRequest, parse_body
from baton.router.plan import Plan, plan_chat, plan_completion
from baton.router.sampling import ModelLimits
from baton.router.slo import SloClasses, Terms
from baton.router.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

TRACE = "x-baton-trace"

Endpoint = Literal["chat", "completions"]


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP call: when it came, what it asked for by headers, and how to count its end."""

    endpoint: Endpoint
    headers: Mapping[str, str]  # of the reply
    wants_trace: bool
    started: float = field(default_factory=time.monotonic)


class Service:
    def __init__(
        self,
        config: RouterConfig,
        model: str,
        tokenizer: Tokenizer,
        membership: Membership,
        dispatcher: Dispatcher,
        metrics: Metrics,
    ) -> None:
        self.config = config
        self.model = model
        self.membership = membership
        self.metrics = metrics
        self.is_draining = False
        self._tokenizer = tokenizer
        self._dispatcher = dispatcher
        self._slo = SloClasses(config.slo)
        self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def why_unusable(self) -> str | None:
        return "this gateway is shutting down" if self.is_draining else self.membership.why_unusable()

    async def wait_idle(self) -> None:
        await self._idle.wait()

    async def answer(self, endpoint: Endpoint, request: Request) -> Response:
        """Answer one generation call; the streamed part runs when the response is sent."""
        call = Call(endpoint, reply_headers(request), request.headers.get(TRACE) == "1")
        self._begin()
        try:
            terms = Terms(slo=self._slo.choose(request.headers))
            plan = await self._plan(endpoint, await read_body(request, self.config.max_body_bytes))
            generation, writer = self._generation(plan, call, terms), self._writer(plan, endpoint)
            if plan.body.stream:
                events = self._events(plan, call, generation, writer)
                return EventStream(events, call.headers, partial(self._end_stream, call, generation))
            body = await while_connected(request.receive, self._body(call, generation, writer))
        except RouterError as error:
            self._end(call, error.status, error.code)
            return error_response(error, call.headers)
        except ClientDisconnect:
            self._end(call, CLIENT_CLOSED, "client_closed")
            return Response(status_code=CLIENT_CLOSED)
        except BaseException:
            self._end(call, 500, "internal_error")
            raise
        self._end(call, 200, None)
        return json_response(body, headers=call.headers)

    async def _plan(self, endpoint: Endpoint, data: bytes) -> Plan:
        body = parse_body(ChatRequest if endpoint == "chat" else CompletionRequest, data)
        if body.model != self.model:
            raise ModelNotFound(f"this server has one model, {self.model!r}: ask for that", param="model")
        context = self.membership.max_context()
        reason = self.why_unusable()
        if reason is not None or context is None:
            raise NoWorkers(f"{reason}: try again shortly", retry_after_s=1)
        limits = ModelLimits(self._tokenizer.vocab_size, context)
        if isinstance(body, ChatRequest):
            return await plan_chat(body, self._tokenizer, limits, self.config.request_timeout_s)
        return await plan_completion(body, self._tokenizer, limits, self.config.request_timeout_s)

    def _generation(self, plan: Plan, call: Call, terms: Terms) -> Generation:
        stops = plan.body.stop or []
        choices = [Choice(i, request, stops, self._tokenizer) for i, request in enumerate(plan.requests)]
        return Generation(choices, plan.num_choices, self._dispatcher, self.metrics, terms=terms, started=call.started)

    def _writer(self, plan: Plan, endpoint: Endpoint) -> ReplyWriter:
        is_chat = endpoint == "chat"
        format = ChatFormat(self._tokenizer) if is_chat else CompletionFormat(self._tokenizer, plan.echo)
        return ReplyWriter(format, self.model, include_usage=plan.include_usage)

    async def _body(self, call: Call, generation: Generation, writer: ReplyWriter) -> bytes:
        deltas: list[Delta] = []
        async with aclosing(generation.deltas()) as batches:
            async for batch in batches:
                deltas += batch
        return writer.body(deltas, generation.usage(), _trace(call, generation))

    async def _events(
        self, plan: Plan, call: Call, generation: Generation, writer: ReplyWriter
    ) -> AsyncGenerator[bytes, None]:
        """Yield events. An error before the first is raised; one after it is told in the last event."""
        has_begun = False
        try:
            async with aclosing(generation.deltas()) as batches:
                async for batch in batches:
                    events = writer.events(batch)
                    if events:
                        yield events
                        has_begun = True
        except Exception as error:  # the stream's root: whatever it is, the client must hear of it
            if not has_begun:
                raise
            generation.failure = _as_router_error(error)
            yield error_event(generation.failure.body())
            return
        yield writer.last_events(
            generation.usage() if plan.include_usage else None, _trace(call, generation) if call.wants_trace else None
        )

    def _end_stream(self, call: Call, generation: Generation, status: int, reason: str | None) -> None:
        """Count a stream that failed on its way by its failure: the status line had gone out before."""
        failure = generation.failure
        self._end(call, failure.status if failure else status, failure.code if failure else reason)

    def _begin(self) -> None:
        self._num_running += 1
        self._idle.clear()
        self.metrics.started()

    def _end(self, call: Call, status: int, reason: str | None) -> None:
        self._num_running -= 1
        if self._num_running == 0:
            self._idle.set()
        self.metrics.ended(call.endpoint, status, time.monotonic() - call.started)
        if reason is not None:
            self.metrics.refused(reason)


def _as_router_error(error: Exception) -> RouterError:
    if isinstance(error, RouterError):
        return error
    logger.error("a stream failed", exc_info=error)
    return RouterError("the gateway failed to serve this request")


def _trace(call: Call, generation: Generation) -> dict[str, Any]:
    """Say who served the call and where its time went: the `baton` extension of the reply."""
    return {
        "ttft_s": generation.ttft_s,
        "e2e_s": time.monotonic() - call.started,
        "served": msgspec.to_builtins(generation.served()),
    }
