"""The gateway's Prometheus metrics, in a registry of its own.

Labels have few values (endpoint, status, reason, phase, outcome). Metrics can never fail a request: every recording
method swallows and logs its own errors.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Concatenate, Literal, ParamSpec

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from baton.actors.messages import PhaseTimes

logger = logging.getLogger(__name__)

# fmt: off
TTFT_BUCKETS = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
ITL_BUCKETS = (.002, .004, .006, .008, .01, .015, .02, .025, .03, .035, .04, .06, .08, .1, .2, .4, .6, .8, 1, 2, 4, 8)
E2E_BUCKETS = (.05, .1, .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
# fmt: on

NO_KEY = "none"  # label of requests without an API key

P = ParamSpec("P")


def _never_fails(record: Callable[Concatenate[Metrics, P], None]) -> Callable[Concatenate[Metrics, P], None]:
    @functools.wraps(record)
    def guarded(self: Metrics, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            record(self, *args, **kwargs)
        except Exception:  # a request must not die of its own bookkeeping
            logger.exception("metrics: %s failed", record.__name__)

    return guarded


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self._requests = Counter(
            "baton_gateway_requests", "HTTP requests by outcome", ("endpoint", "status"), registry=registry
        )
        self._choices = Counter(
            "baton_gateway_choices", "Generated sequences by how they ended", ("finish",), registry=registry
        )
        self._refusals = Counter(
            "baton_gateway_refusals", "Requests answered with an error", ("reason",), registry=registry
        )
        self._prompt_tokens = Counter(
            "baton_gateway_prompt_tokens", "Prompt tokens of served requests", registry=registry
        )
        self._cached_tokens = Counter(
            "baton_gateway_cached_tokens", "Prompt tokens that a cache held already", registry=registry
        )
        self._output_tokens = Counter("baton_gateway_output_tokens", "Tokens sent to clients", registry=registry)
        self._running = Gauge(
            "baton_gateway_running_requests", "HTTP generation requests in progress", registry=registry
        )
        self._workers = Gauge("baton_gateway_workers", "Workers that can take a request", ("role",), registry=registry)
        self._ttft = Histogram(
            "baton_gateway_ttft_seconds", "Request read to first token", buckets=TTFT_BUCKETS, registry=registry
        )
        self._itl = Histogram(
            "baton_gateway_itl_seconds", "Time between a sequence's outputs", buckets=ITL_BUCKETS, registry=registry
        )
        self._e2e = Histogram(
            "baton_gateway_e2e_seconds", "Request read to last token", buckets=E2E_BUCKETS, registry=registry
        )
        self._phases = Histogram(
            "baton_gateway_phase_seconds",
            "TTFT phases as workers report them",
            ("phase",),
            buckets=TTFT_BUCKETS,
            registry=registry,
        )

        self._add_shares(registry)

    def _add_shares(self, registry: CollectorRegistry) -> None:
        """Add what is counted by class and by key, and the queue's."""
        self._judged = Counter(
            "baton_gateway_slo_sequences",
            "Sequences by whether they met the targets of their class, or which they missed",
            ("slo", "outcome"),
            registry=registry,
        )
        self._goodput = Counter(
            "baton_gateway_goodput_tokens", "Tokens of sequences that met their targets", ("slo",), registry=registry
        )
        self._key_sequences = Counter(
            "baton_gateway_key_sequences", "The same by API key", ("key", "outcome"), registry=registry
        )
        self._key_tokens = Counter(
            "baton_gateway_key_tokens", "Tokens by API key, prompt or output", ("key", "kind"), registry=registry
        )
        self._migrations = Counter(
            "baton_gateway_migrations", "Sequences that went on with another worker", ("reason",), registry=registry
        )
        self._queue_wait = Histogram(
            "baton_gateway_queue_wait_seconds",
            "Wait for a turn in the gateway's queue",
            buckets=TTFT_BUCKETS,
            registry=registry,
        )

    def watch_queue(self, num_requests: Callable[[], float], num_tokens: Callable[[], float]) -> None:
        """Export these as the queue's gauges."""
        for name, what, read in (
            ("baton_gateway_queued_requests", "Sequences that wait for their turn", num_requests),
            ("baton_gateway_queued_tokens", "Their prompt tokens", num_tokens),
        ):
            Gauge(name, what, registry=self.registry).set_function(read)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    @_never_fails
    def started(self) -> None:
        self._running.inc()

    @_never_fails
    def ended(self, endpoint: str, status: int, seconds: float) -> None:
        self._running.dec()
        self._requests.labels(endpoint, str(status)).inc()
        if status == 200:
            self._e2e.observe(seconds)

    @_never_fails
    def refused(self, reason: str) -> None:
        self._refusals.labels(reason).inc()

    @_never_fails
    def first_output(self, seconds: float, prompt_tokens: int, cached_tokens: int) -> None:
        self._ttft.observe(seconds)
        self._prompt_tokens.inc(prompt_tokens)
        self._cached_tokens.inc(cached_tokens)

    @_never_fails
    def output(self, num_tokens: int, interval_s: float | None) -> None:
        self._output_tokens.inc(num_tokens)
        if interval_s is not None:
            self._itl.observe(interval_s)

    @_never_fails
    def finished(self, finish: str) -> None:
        self._choices.labels(finish).inc()

    @_never_fails
    def judged(self, slo: str, key: str, outcome: str, num_tokens: int) -> None:
        """Count one sequence's end. `outcome`: met, ttft or itl (the target that was missed), refused, failed."""
        self._judged.labels(slo, outcome).inc()
        self._key_sequences.labels(key or NO_KEY, outcome).inc()
        self._key_tokens.labels(key or NO_KEY, "output").inc(num_tokens)
        if outcome == "met":
            self._goodput.labels(slo).inc(num_tokens)

    @_never_fails
    def prompt_of_key(self, key: str, num_tokens: int) -> None:
        self._key_tokens.labels(key or NO_KEY, "prompt").inc(num_tokens)

    @_never_fails
    def queued(self, seconds: float) -> None:
        self._queue_wait.observe(seconds)

    @_never_fails
    def migrated(self, reason: Literal["lost", "handed_back"]) -> None:
        self._migrations.labels(reason).inc()

    @_never_fails
    def phases(self, times: PhaseTimes) -> None:
        for phase, seconds in (
            ("queue", times.queue_s),
            ("prefill", times.prefill_s),
            ("handover", times.handover_s),
            ("first_step", times.first_step_s),
        ):
            self._phases.labels(phase).observe(seconds)

    @_never_fails
    def set_workers(self, num_decode: int, num_prefill: int) -> None:
        self._workers.labels("decode").set(num_decode)
        self._workers.labels("prefill").set(num_prefill)
