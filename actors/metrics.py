"""A worker's Prometheus series, on a registry and a port of its own.

Names are prefixed `baton_`; labels are few and closed. Buckets: vLLM's for first tokens, SGLang's for steps, since
each of the two starts where the other has no resolution (reference: shared/reference/engines.md section 6).
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from baton.actors.messages import PhaseTimes
from baton.actors.step_loop import StepReport

PHASE_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
STEP_BUCKETS_S = (0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.8, 1, 2, 4, 8)


class WorkerMetrics:
    """All series of one worker. `serve` opens the endpoint; observing never raises into the caller's path."""

    def __init__(self, worker_id: str) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self._blocks = Gauge("baton_blocks", "KV blocks by state", ["worker", "state"], registry=registry)
        self._sequences = Gauge("baton_sequences", "Sequences by state", ["worker", "state"], registry=registry)
        self._waiting = Gauge(
            "baton_waiting_tokens", "Uncached prompt tokens not yet computed", ["worker"], registry=registry
        )
        self._tokens = Counter("baton_generated_tokens", "Sampled tokens", ["worker"], registry=registry)
        self._cached = Counter("baton_cached_tokens", "Prompt tokens found in the cache", ["worker"], registry=registry)
        self._step = Histogram(
            "baton_step_seconds", "Engine steps", ["worker"], buckets=STEP_BUCKETS_S, registry=registry
        )
        self._phase = Histogram(
            "baton_phase_seconds",
            "Phases of a request",
            ["worker", "phase"],
            buckets=PHASE_BUCKETS_S,
            registry=registry,
        )
        self._handover_bytes = Counter(
            "baton_handover_bytes", "KV bytes written to a peer", ["worker"], registry=registry
        )
        self._handover_s = Histogram(
            "baton_handover_write_seconds",
            "Single writes to a peer",
            ["worker"],
            buckets=PHASE_BUCKETS_S,
            registry=registry,
        )
        self._fallbacks = Counter(
            "baton_handover_fallbacks", "Hand-overs given up by decode", ["worker"], registry=registry
        )
        self._worker = worker_id

    def serve(self, host: str, port: int) -> tuple[str, Callable[[], None]]:
        """Open the endpoint; return its host:port and the function that closes it. Port 0 takes a free one."""
        server, thread = start_http_server(port, addr=host, registry=self.registry)

        def close() -> None:
            server.shutdown()
            thread.join()

        return f"{host}:{server.server_port}", close

    def on_report(self, report: StepReport) -> None:
        worker = self._worker
        for state in ("free", "cached", "held"):
            self._blocks.labels(worker, state).set(getattr(report.counts, state))
        self._sequences.labels(worker, "running").set(report.num_running)
        self._sequences.labels(worker, "waiting").set(report.num_waiting)
        self._waiting.labels(worker).set(report.waiting_tokens)
        self._tokens.labels(worker).inc(sum(len(update.tokens) for update in report.updates))
        if report.step_s > 0 and report.updates:
            self._step.labels(worker).observe(report.step_s)

    def on_first_token(self, cached_tokens: int) -> None:
        self._cached.labels(self._worker).inc(cached_tokens)

    def on_phases(self, times: PhaseTimes) -> None:
        for phase in ("queue", "prefill", "handover", "first_step"):
            self._phase.labels(self._worker, phase).observe(getattr(times, f"{phase}_s"))

    def on_write(self, num_bytes: int, seconds: float) -> None:
        self._handover_bytes.labels(self._worker).inc(num_bytes)
        self._handover_s.labels(self._worker).observe(seconds)

    def on_fallback(self) -> None:
        self._fallbacks.labels(self._worker).inc()
