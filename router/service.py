"""One generation call from its body to its last byte, for every endpoint: parse, plan, generate, answer, account.

Knows HTTP requests and responses; routes and the process's life are gateway.py's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from baton.actors.engine.request import Request as EngineRequest
from baton.actors.spans import NoSpan, NoSpans, Span, Spans
from baton.router.api_keys import Visit, make_door
from baton.router.body_reader import BodyReader
from baton.router.config import RouterConfig
from baton.router.dispatch import Dispatcher
from baton.router.endpoints import Endpoint, Reading, StreamWriter, Writer
from baton.router.errors import ModelNotFound, NoWorkers, RouterError
from baton.router.generation import Choice, Delta, Generation
from baton.router.generation_config import SamplingDefaults
from baton.router.http_io import (
    CLIENT_CLOSED,
    REQUEST_ID,
    Events,
    EventStream,
    error_response,
    json_response,
    reply_headers,
    while_connected,
)
from baton.router.membership import Membership
from baton.router.metrics import Metrics
from baton.router.openai_models import ChatRequest, CompletionRequest
from baton.router.plan import Plan, plan_chat, plan_completion
from baton.router.sampling import ModelLimits
from baton.router.slo import SloClasses, Terms
from baton.router.tokenize import DetokenizeRequest, TokenizeRequest
from baton.router.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

TRACE = "x-baton-trace"
TRACEPARENT = "traceparent"  # W3C's

Asked = TypeVar("Asked", TokenizeRequest, DetokenizeRequest)


@dataclass(slots=True)
class Call:
    """One HTTP call: when it came, what it asked for by headers, and how to count its end."""

    endpoint: Endpoint[Any]
    headers: Mapping[str, str]  # of the reply
    wants_trace: bool
    started: float = field(default_factory=time.monotonic)
    visit: Visit | None = None
    terms: Terms = field(default_factory=Terms)
    span: Span = field(default_factory=NoSpan)
    generation: Generation | None = None


@dataclass(frozen=True, slots=True)
class Backend:
    """What serves the requests."""

    membership: Membership
    dispatcher: Dispatcher
    metrics: Metrics
    spans: Spans = field(default_factory=NoSpans)


class Service:
    def __init__(
        self, config: RouterConfig, model: str, tokenizer: Tokenizer, backend: Backend, defaults: SamplingDefaults
    ) -> None:
        self.config = config
        self.model = model
        self.tokenizer = tokenizer
        self.membership = backend.membership
        self.metrics = backend.metrics
        self._spans = backend.spans
        self.door = make_door(config.api_keys, config.api_keys_file)
        self.is_draining = False
        self._dispatcher = backend.dispatcher
        self._defaults = defaults
        self._reader = BodyReader(
            max_bytes=config.max_body_bytes,
            max_held_bytes=config.max_held_body_bytes,
            longest_token=max(map(len, tokenizer.token_bytes.values())),
            lane=tokenizer.lane,
        )
        self._slo = SloClasses(config.slo)
        self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def limits(self) -> ModelLimits:
        """Return what every decode worker can hold. Raises NoWorkers."""
        context = self.membership.max_context()
        reason = "this gateway is shutting down" if self.is_draining else self.membership.why_hopeless()
        if reason is not None or context is None:
            raise NoWorkers(f"{reason or 'no decode worker has registered'}: try again shortly", retry_after_s=1)
        return ModelLimits(self.tokenizer.vocab_size, context, self._defaults)

    def check_model(self, name: str) -> None:
        if name != self.model:
            raise ModelNotFound(f"this server has one model, {self.model!r}: ask for that", param="model")

    async def answer(self, endpoint: Endpoint[Any], request: Request) -> Response:
        """Answer one generation call; the streamed part runs when the response is sent."""
        call = self._call(endpoint, request)
        self._begin()
        try:
            call.visit = self.door.enter(request.headers)
            call.terms = self._slo.terms(request.headers, call.visit.name)
            body = await self._read(endpoint, request)
            core = endpoint.core(body)
            plan = await self._plan(core)
            generation = call.generation = self._generation(plan, call)
            prompt_tokens = generation.usage().prompt_tokens
            writer = endpoint.writer(Reading(body, core, self.model, self.tokenizer, prompt_tokens))
            if core.stream:
                # Only endpoints that stream have a body that asks for it.
                events = self._events(call, generation, cast(StreamWriter, writer))
                return EventStream(events, call.headers, endpoint.error, partial(self._end_stream, call, generation))
            reply = await while_connected(request.receive, self._body(call, generation, writer, plan))
        except RouterError as error:
            self._end(call, error.status, error.code)
            return error_response(error, call.headers, endpoint.error)
        except ClientDisconnect:
            self._end(call, CLIENT_CLOSED, "client_closed")
            return Response(status_code=CLIENT_CLOSED)
        except BaseException:
            self._end(call, 500, "internal_error")
            raise
        self._end(call, 200, None)
        return json_response(reply, headers=call.headers)

    async def ask(
        self, name: str, body: type[Asked], request: Request, reply: Callable[[Asked], Awaitable[dict[str, Any]]]
    ) -> Response:
        """Answer a call that needs no worker. Raises RouterError."""
        visit = self.door.enter(request.headers)
        try:
            asked = await self._reader.read(name, body, request, self.membership.max_context())
            if asked.model is not None:
                self.check_model(asked.model)
            return json_response(await reply(asked), headers=reply_headers(request))
        finally:
            visit.leave(0)

    def _call(self, endpoint: Endpoint[Any], request: Request) -> Call:
        started, headers = time.monotonic(), reply_headers(request)
        span = self._spans.open(endpoint.name, request.headers.get(TRACEPARENT, ""), started)
        if span.context:
            headers[TRACEPARENT] = span.context
        return Call(endpoint, headers, request.headers.get(TRACE) == "1", started, span=span)

    async def _read(self, endpoint: Endpoint[Any], request: Request) -> Any:
        body = await self._reader.read(endpoint.name, endpoint.body, request, self.membership.max_context())
        self.check_model(body.model)
        return body

    async def _plan(self, body: ChatRequest | CompletionRequest) -> Plan:
        limits = self.limits()
        if isinstance(body, ChatRequest):
            return await plan_chat(body, self.tokenizer, limits, self.config.request_timeout_s)
        return await plan_completion(body, self.tokenizer, limits, self.config.request_timeout_s)

    def _generation(self, plan: Plan, call: Call) -> Generation:
        stops, trace = plan.body.stop or [], call.span.context
        planned = time.monotonic()
        self._spans.record("plan", trace, call.started, planned)
        choices = [
            Choice(i, _traced(request, trace), stops, self.tokenizer, echo, plan.manner)
            for i, (request, echo) in enumerate(zip(plan.requests, plan.echo, strict=True))
        ]
        generation = Generation(
            choices, plan.num_choices, self._dispatcher, self.metrics, terms=call.terms, started=call.started
        )
        generation.planned = planned
        return generation

    async def _body(self, call: Call, generation: Generation, writer: Writer, plan: Plan) -> bytes:
        deltas: list[Delta] = []
        async with aclosing(generation.deltas()) as batches:
            async for batch in batches:
                deltas += batch
        best = generation.best(deltas, plan.num_kept, plan.scorer)
        return writer.body(best, generation.usage(), _trace(call, generation))

    async def _events(self, call: Call, generation: Generation, writer: StreamWriter) -> AsyncGenerator[Events, None]:
        """Yield events. An error before the first is raised; one after it is told in the last event."""
        has_begun = False
        events = b""
        try:
            async with aclosing(generation.deltas()) as batches:
                async for batch in batches:
                    events += writer.events(batch)
                    if events and not generation.is_finished:  # the last deltas go with what ends the stream
                        yield Events(events, is_last=False)
                        has_begun, events = True, b""
        except Exception as error:  # the stream's root: whatever it is, the client must hear of it
            if not has_begun:
                raise
            generation.failure = _as_router_error(error)
            yield Events(events + writer.error_event(generation.failure), is_last=True)
            return
        trace = _trace(call, generation) if call.wants_trace else None
        yield Events(events + writer.last_events(generation.usage(), trace), is_last=True)

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
        if call.visit is not None:
            call.visit.leave(call.generation.usage().total_tokens if call.generation else 0)
        seconds = time.monotonic() - call.started
        self.metrics.ended(call.endpoint.name, status, seconds)
        extra = {"request_id": call.headers[REQUEST_ID], "trace": call.span.context}
        logger.info("%s %d in %.3f s", call.endpoint.name, status, seconds, extra=extra)
        ttft_s = call.generation.ttft_s if call.generation else None
        call.span.end(status=status, request_id=call.headers[REQUEST_ID], ttft_s=ttft_s or 0.0)
        if reason is not None:
            self.metrics.refused(reason)


def _traced(request: EngineRequest, trace: str) -> EngineRequest:
    return msgspec.structs.replace(request, trace=trace) if trace else request


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
