"""The gateway's Prometheus metrics, in a registry of its own.

Labels have few values (endpoint, status, reason, phase, outcome). Metrics can never fail a request: every recording
method swallows and logs its own errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from baton.actors.guarded import never_fails
from baton.actors.messages import PhaseTimes
from baton.router.routing_metrics import RoutingMetrics

# fmt: off
TTFT_BUCKETS = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
ITL_BUCKETS = (.002, .004, .006, .008, .01, .015, .02, .025, .03, .035, .04, .06, .08, .1, .2, .4, .6, .8, 1, 2, 4, 8)
E2E_BUCKETS = (.05, .1, .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
# fmt: on

NO_KEY = "none"  # label of requests without an API key


class Metrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._routing = RoutingMetrics(registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"baton_gateway_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"baton_gateway_{name}", text, labels, buckets=buckets, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"baton_gateway_{name}", text, labels, registry=registry)

        self._requests = counter("requests", "HTTP requests by outcome", "endpoint", "status")
        self._choices = counter("choices", "Generated sequences by how they ended", "finish")
        self._refusals = counter("refusals", "Requests answered with an error", "reason")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of served requests")
        self._cached_tokens = counter("cached_tokens", "Prompt tokens that a cache held already")
        self._output_tokens = counter("output_tokens", "Tokens sent to clients")
        self._running = gauge("running_requests", "HTTP generation requests in progress")
        self._workers = gauge("workers", "Workers that can take a request", "role")
        self._ttft = histogram("ttft_seconds", "Request read to first token", TTFT_BUCKETS)
        self._itl = histogram("itl_seconds", "Time between a sequence's outputs", ITL_BUCKETS)
        self._e2e = histogram("e2e_seconds", "Request read to last token", E2E_BUCKETS)
        phases = histogram("phase_seconds", "TTFT phases as workers report them", TTFT_BUCKETS, "phase")
        self._phases = [phases.labels(phase) for phase in ("queue", "prefill", "handover", "first_step")]
        self._queue_wait = histogram("queue_wait_seconds", "Wait for a turn in the gateway's queue", TTFT_BUCKETS)
        self._migrations = counter("migrations", "Sequences that went on with another worker", "reason")
        judged = "Sequences by whether they met the targets of their class, or which they missed"
        self._judged = counter("slo_sequences", judged, "slo", "outcome")
        self._goodput = counter("goodput_tokens", "Tokens of sequences that met their targets", "slo")
        self._key_sequences = counter("key_sequences", "Sequences by API key and outcome", "key", "outcome")
        self._key_tokens = counter("key_tokens", "Tokens by API key, prompt or output", "key", "kind")

    def watch_queue(self, num_requests: Callable[[], float], num_tokens: Callable[[], float]) -> None:
        """Export these as the queue's gauges."""
        for name, what, read in (
            ("baton_gateway_queued_requests", "Sequences that wait for their turn", num_requests),
            ("baton_gateway_queued_tokens", "Their prompt tokens", num_tokens),
        ):
            Gauge(name, what, registry=self.registry).set_function(read)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    @never_fails
    def started(self) -> None:
        self._running.inc()

    @never_fails
    def ended(self, endpoint: str, status: int, seconds: float) -> None:
        self._running.dec()
        self._requests.labels(endpoint, str(status)).inc()
        if status == 200:
            self._e2e.observe(seconds)

    @never_fails
    def refused(self, reason: str) -> None:
        self._refusals.labels(reason).inc()

    @never_fails
    def first_output(self, seconds: float, prompt_tokens: int, cached_tokens: int) -> None:
        self._ttft.observe(seconds)
        self._prompt_tokens.inc(prompt_tokens)
        self._cached_tokens.inc(cached_tokens)

    @never_fails
    def output(self, num_tokens: int, interval_s: float | None) -> None:
        self._output_tokens.inc(num_tokens)
        if interval_s is not None:
            self._itl.observe(interval_s)

    @never_fails
    def finished(self, finish: str) -> None:
        self._choices.labels(finish).inc()

    @never_fails
    def judged(self, slo: str, key: str, outcome: str, num_tokens: int) -> None:
        """Count one sequence's end. `outcome`: met, ttft or itl (the target that was missed), refused, failed."""
        self._judged.labels(slo, outcome).inc()
        self._key_sequences.labels(key or NO_KEY, outcome).inc()
        self._key_tokens.labels(key or NO_KEY, "output").inc(num_tokens)
        if outcome == "met":
            self._goodput.labels(slo).inc(num_tokens)

    @never_fails
    def prompt_of_key(self, key: str, num_tokens: int) -> None:
        self._key_tokens.labels(key or NO_KEY, "prompt").inc(num_tokens)

    @never_fails
    def queued(self, seconds: float) -> None:
        self._queue_wait.observe(seconds)

    @never_fails
    def migrated(self, reason: Literal["lost", "handed_back"]) -> None:
        self._migrations.labels(reason).inc()

    @never_fails
    def phases(self, times: PhaseTimes) -> None:
        seconds = times.queue_s, times.prefill_s, times.handover_s, times.first_step_s
        for phase, value in zip(self._phases, seconds, strict=True):
            phase.observe(value)

    @never_fails
    def set_workers(self, num_decode: int, num_prefill: int) -> None:
        self._workers.labels("decode").set(num_decode)
        self._workers.labels("prefill").set(num_prefill)

    @never_fails
    def routed(self, seconds: float, *, is_disaggregated: bool) -> None:
        self._routing.decided(seconds, is_disaggregated=is_disaggregated)

    @never_fails
    def predicted(self, predicted_ms: float | None, actual_s: float) -> None:
        """A request's first token came, so long after it was routed."""
        self._routing.first_token(None if predicted_ms is None else predicted_ms / 1e3, actual_s)
