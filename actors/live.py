"""A request that a worker answers, with all that would still act for it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from baton.actors.faults import is_device_fault
from baton.actors.gateway_session import GatewaySession
from baton.actors.generation import Generation
from baton.actors.messages import Output
from baton.actors.spans import Spans


@dataclass(slots=True)
class Live:
    generation: Generation
    session: GatewaySession
    fetch: asyncio.Task[None] | None = None
    grammar: object = None  # held, so that the engine finds it
    deadline: asyncio.TimerHandle | None = None

    def end(self) -> None:
        """Let go of what would still act for the request."""
        self.session.request_ids.discard(self.generation.request_id)
        if self.fetch is not None:
            self.fetch.cancel()
        if self.deadline is not None:
            self.deadline.cancel()


def cut_short(request_id: str, worker_id: str, error: BaseException) -> Output:
    """Return the last output of a request that a worker's own end ends.

    What a device's fault has cut short may go on elsewhere; any other failure may be the request's own doing.
    """
    if is_device_fault(str(error)):
        return Output(request_id=request_id, finish="cancelled")
    message = f"worker {worker_id} failed: {type(error).__name__}"
    return Output(request_id=request_id, finish="error", error=message)


def record_spans(spans: Spans, generation: Generation, last: Output) -> None:
    """Tell where a traced request's time went on this worker, once it has ended."""
    request = generation.submit.request
    if not request.trace:
        return
    span = spans.open("serve", request.trace, generation.started)
    for lap in generation.laps:
        spans.record(lap.name, span.context, lap.start_s, lap.end_s)
    span.end(request_id=request.id, output_tokens=len(generation.sent), finish=last.finish or "")
