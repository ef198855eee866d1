"""A worker's Prometheus series, on a registry and a port of its own. deploy/README.md explains each.

Names are prefixed `baton_`; labels are few and closed. Buckets: vLLM's for first tokens, SGLang's for steps, since
each of the two starts where the other has no resolution (reference: shared/reference/engines.md section 6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.actors.ceilings import Ceilings
from baton.actors.engine.speculation import DraftCounts
from baton.actors.engine.work import WorkDone
from baton.actors.guarded import never_fails
from baton.actors.messages import PhaseTimes, WorkerInfo
from baton.actors.step_loop import StepReport

PHASE_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
STEP_BUCKETS_S = (0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.8, 1, 2, 4, 8)

Values = Mapping[tuple[str, ...], float]  # by the values of the labels after `worker`


class WorkerMetrics:
    """All series of one worker. `serve` opens the endpoint; observing never raises into the caller's path."""

    def __init__(self, worker_id: str) -> None:
        self.registry = registry = CollectorRegistry()
        self.state = StateCollector(worker_id)
        registry.register(self.state)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ["worker"], registry=registry).labels(worker_id)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ["worker"], buckets=buckets, registry=registry).labels(worker_id)

        self._tokens = counter("baton_generated_tokens", "Sampled tokens")
        self._cached = counter("baton_cached_tokens", "Prompt tokens found in the cache, or brought by a peer")
        self._busy = counter("baton_engine_busy_seconds", "Time in which the engine had a step to compute")
        self._step = histogram("baton_step_seconds", "Engine steps", STEP_BUCKETS_S)
        self._handover_bytes = counter("baton_handover_bytes", "KV bytes written to a peer")
        self._handover_s = histogram("baton_handover_write_seconds", "Single writes to a peer", PHASE_BUCKETS_S)
        self._fallbacks = counter("baton_handover_fallbacks", "Hand-overs given up by decode")
        phase = Histogram(
            "baton_phase_seconds",
            "Phases of a request",
            ["worker", "phase"],
            buckets=PHASE_BUCKETS_S,
            registry=registry,
        )
        self._phases = {name: phase.labels(worker_id, name) for name in ("queue", "prefill", "handover", "first_step")}

    def serve(self, host: str, port: int) -> tuple[str, Callable[[], None]]:
        """Open the endpoint; return its host:port and the function that closes it. Port 0 takes a free one."""
        server, thread = start_http_server(port, addr=host, registry=self.registry)

        def close() -> None:
            server.shutdown()
            thread.join()

        return f"{host}:{server.server_port}", close

    def watch(
        self,
        work: WorkDone,
        ceilings: Ceilings | None,
        info: Callable[[], WorkerInfo],
        handovers: Mapping[str, Sized],
        drafts: DraftCounts,
    ) -> None:
        """Say where to look when Prometheus asks."""
        state = self.state
        state.work, state.ceilings, state.info, state.handovers = work, ceilings, info, handovers
        state.drafts = drafts

    @never_fails
    def on_report(self, report: StepReport) -> None:
        self.state.report = report
        self._tokens.inc(sum(len(update.tokens) for update in report.updates))
        if report.step_s > 0 and report.updates:
            self._busy.inc(report.step_s)
            self._step.observe(report.step_s)

    @never_fails
    def on_first_token(self, cached_tokens: int) -> None:
        self._cached.inc(cached_tokens)

    @never_fails
    def on_phases(self, times: PhaseTimes) -> None:
        for phase, histogram in self._phases.items():
            histogram.observe(getattr(times, f"{phase}_s"))

    @never_fails
    def on_write(self, num_bytes: int, seconds: float) -> None:
        self._handover_bytes.inc(num_bytes)
        self._handover_s.observe(seconds)

    @never_fails
    def on_fallback(self) -> None:
        self._fallbacks.inc()


class StateCollector(Collector):
    """What is read when Prometheus asks, in place of at every step: the last report, and the engine's totals."""

    def __init__(self, worker_id: str) -> None:
        self.report: StepReport | None = None
        self.work = WorkDone()
        self.ceilings: Ceilings | None = None
        self.info: Callable[[], WorkerInfo] | None = None
        self.handovers: Mapping[str, Sized] = {}  # by side
        self.drafts = DraftCounts()
        self._worker = worker_id

    def collect(self) -> Iterator[Metric]:
        if self.info is not None:
            info = self.info()
            key = (info.role, info.version, info.mover)
            yield self._gauge("baton_worker_info", "What the worker is", {key: 1}, "role", "version", "mover")
            sides = _keyed({side: len(handovers) for side, handovers in self.handovers.items()})
            yield self._gauge("baton_handovers_open", "Hand-overs under way", sides, "side")
        if self.report is not None:
            yield from self._collect_report(self.report)
        work = self.work
        tokens = _keyed({"prefill": work.prefill_tokens, "decode": work.decode_tokens})
        yield self._counter("baton_computed_tokens", "Positions computed, by what for", tokens, "kind")
        yield self._counter("baton_model_flops", "Estimated arithmetic of one rank", {(): work.flops})
        yield self._counter("baton_model_bytes", "Estimated memory traffic of one rank", {(): work.bytes_moved})
        yield self._drafts("baton_draft_tokens", "Drafted tokens that were verified, by place", self.drafts.verified)
        yield self._drafts("baton_accepted_draft_tokens", "Drafted tokens that counted", self.drafts.accepted)
        if self.ceilings is not None:
            flops, moved = self.ceilings.flops_per_s, self.ceilings.bytes_per_s
            yield self._gauge("baton_device_flops_per_second", "The most the device was measured to do", {(): flops})
            yield self._gauge("baton_device_bytes_per_second", "The most the device was measured to copy", {(): moved})

    def _collect_report(self, report: StepReport) -> Iterator[Metric]:
        counts = report.counts
        blocks = _keyed({"free": counts.free, "cached": counts.cached, "held": counts.held})
        yield self._gauge("baton_blocks", "KV blocks by state", blocks, "state")
        sequences = _keyed({"running": report.num_running, "waiting": report.num_waiting})
        yield self._gauge("baton_sequences", "Sequences by state", sequences, "state")
        waiting = {(): report.waiting_tokens}
        yield self._gauge("baton_waiting_tokens", "Uncached prompt tokens not yet computed", waiting)

    def _drafts(self, name: str, text: str, counts: list[int]) -> Metric:
        return self._counter(name, text, {(str(place),): num for place, num in enumerate(counts, 1)}, "place")

    def _gauge(self, name: str, text: str, values: Values, *labels: str) -> Metric:
        return self._filled(GaugeMetricFamily(name, text, labels=["worker", *labels]), values)

    def _counter(self, name: str, text: str, values: Values, *labels: str) -> Metric:
        return self._filled(CounterMetricFamily(name, text, labels=["worker", *labels]), values)

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
        for key, value in values.items():
            family.add_metric([self._worker, *key], value)
        return family


def _keyed(values: Mapping[str, float]) -> Values:
    return {(key,): value for key, value in values.items()}
