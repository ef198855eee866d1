"""What goes on now, once a second: the status page's data, and `baton top`'s.

Rates and quantiles are of the last seconds, taken from this gateway's own metrics; the workers' loads are those that
their frames report.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route

from baton.router.service import Service
from baton.router.worker_stream import WorkerStream

PAGE = Path(__file__).with_name("status.html")
INTERVAL_S = 1.0
WINDOW = 10  # intervals that rates and quantiles look back

Buckets = Mapping[float, float]  # upper bound -> observations up to it


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    role: str
    num_running: int
    num_waiting: int
    waiting_tokens: int
    blocks_free: int
    blocks_cached: int
    blocks_held: int


class GatewayStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Rates are a second; times are seconds; None where nothing happened."""

    model: str
    time_s: float
    num_running: float
    num_queued: float
    requests_per_s: float
    goodput_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    hit_rate: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    migrations: float
    refusals: float
    workers: tuple[WorkerStatus, ...]  # that can be sent to


class Totals:
    """The counters at one moment, summed over their labels."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.at_s = time.monotonic()
        self.values: dict[str, float] = {}
        self.buckets: dict[str, dict[float, float]] = {}
        for family in registry.collect():
            for sample in family.samples:
                if sample.name.endswith("_bucket"):
                    counts = self.buckets.setdefault(family.name, {})
                    bound = float(sample.labels["le"])
                    counts[bound] = counts.get(bound, 0.0) + sample.value
                else:
                    self.values[sample.name] = self.values.get(sample.name, 0.0) + sample.value


class Sampler:
    """One watcher's view: it remembers the moments that its rates begin at."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._moments: deque[Totals] = deque([Totals(service.metrics.registry)], maxlen=WINDOW)

    def sample(self) -> GatewayStatus:
        first, now = self._moments[0], Totals(self._service.metrics.registry)
        self._moments.append(now)
        seconds = max(now.at_s - first.at_s, 1e-3)

        def grown(name: str) -> float:
            return now.values.get(name, 0.0) - first.values.get(name, 0.0)

        def quantile(name: str, share: float) -> float | None:
            return _quantile(first.buckets.get(name, {}), now.buckets.get(name, {}), share)

        members = self._service.membership
        usable = [*members.decoders(), *members.prefillers()]
        prompt_tokens = grown("baton_gateway_prompt_tokens_total")
        return GatewayStatus(
            model=self._service.model,
            time_s=time.time(),
            num_running=now.values.get("baton_gateway_running_requests", 0.0),
            num_queued=now.values.get("baton_gateway_queued_requests", 0.0),
            requests_per_s=grown("baton_gateway_requests_total") / seconds,
            goodput_per_s=grown("baton_gateway_goodput_tokens_total") / seconds,
            output_tokens_per_s=grown("baton_gateway_output_tokens_total") / seconds,
            prompt_tokens_per_s=prompt_tokens / seconds,
            hit_rate=grown("baton_gateway_cached_tokens_total") / prompt_tokens if prompt_tokens else None,
            ttft_p50_s=quantile("baton_gateway_ttft_seconds", 0.5),
            ttft_p99_s=quantile("baton_gateway_ttft_seconds", 0.99),
            itl_p50_s=quantile("baton_gateway_itl_seconds", 0.5),
            itl_p99_s=quantile("baton_gateway_itl_seconds", 0.99),
            migrations=now.values.get("baton_gateway_migrations_total", 0.0),
            refusals=now.values.get("baton_gateway_refusals_total", 0.0),
            workers=tuple(_worker(stream) for stream in sorted(usable, key=lambda s: s.info.peer.worker_id)),
        )


def _worker(stream: WorkerStream) -> WorkerStatus:
    load = stream.load
    return WorkerStatus(
        name=stream.info.peer.worker_id,
        role=stream.info.role,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        waiting_tokens=load.waiting_tokens,
        blocks_free=load.blocks_free,
        blocks_cached=load.blocks_cached,
        blocks_held=load.blocks_held,
    )


def _quantile(before: Buckets, now: Buckets, share: float) -> float | None:
    """Interpolate inside the bucket that holds the quantile, as Prometheus does."""
    grown = [(bound, count - before.get(bound, 0.0)) for bound, count in sorted(now.items())]
    if not grown or grown[-1][1] <= 0:
        return None
    rank = share * grown[-1][1]
    low, below = 0.0, 0.0
    for bound, count in grown:
        if count >= rank:
            is_last = bound == float("inf")
            return low if is_last else low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    return low


def status_routes(service: Service) -> list[Route]:
    async def page(request: Request) -> Response:
        return FileResponse(PAGE, media_type="text/html")

    async def events(request: Request) -> Response:
        return StreamingResponse(_events(Sampler(service)), media_type="text/event-stream")

    return [Route("/status", page, name="status"), Route("/status/events", events, name="status_events")]


async def _events(sampler: Sampler) -> AsyncGenerator[bytes, None]:
    while True:
        yield b"data: " + msgspec.json.encode(sampler.sample()) + b"\n\n"
        await asyncio.sleep(INTERVAL_S)
