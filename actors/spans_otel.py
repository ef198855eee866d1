"""Spans that go to a collector by OTLP over HTTP. Needs the packages of the extra `tracing`."""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from baton.actors.config import TracingConfig
from baton.actors.spans import Attribute, NoSpan, Span, monotonic_offset_ns

HEADER = "traceparent"


class OtelSpans:
    """One provider per process, never OpenTelemetry's global one."""

    def __init__(self, config: TracingConfig, process: str) -> None:
        exporter = OTLPSpanExporter(endpoint=f"{config.otlp_endpoint}/v1/traces")
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "baton", "service.instance.id": process}),
            sampler=ParentBased(TraceIdRatioBased(config.sample)),
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
        self._tracer = self._provider.get_tracer("baton")
        self._propagator = TraceContextTextMapPropagator()
        self._offset_ns = monotonic_offset_ns()

    def open(self, name: str, parent: str, start_s: float) -> Span:
        span = self._tracer.start_span(name, self._context(parent), start_time=self._wall_ns(start_s))
        if not span.is_recording():
            return NoSpan()
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, trace.set_span_in_context(span))
        return _OtelSpan(self, span, carrier[HEADER])

    def record(self, name: str, parent: str, start_s: float, end_s: float, **attributes: Attribute) -> None:
        if parent:
            self.open(name, parent, start_s).end(end_s, **attributes)

    def close(self) -> None:
        self._provider.shutdown()

    def _context(self, parent: str) -> Context | None:
        return self._propagator.extract({HEADER: parent}, Context()) if parent else Context()

    def _wall_ns(self, at_s: float) -> int:
        return int(at_s * 1e9) + self._offset_ns

    def end(self, span: trace.Span, end_s: float | None, attributes: dict[str, Attribute]) -> None:
        span.set_attributes(attributes)
        span.end(None if end_s is None else self._wall_ns(end_s))


class _OtelSpan:
    def __init__(self, spans: OtelSpans, span: trace.Span, context: str) -> None:
        self.context = context
        self._spans = spans
        self._span = span

    def end(self, end_s: float | None = None, **attributes: Attribute) -> None:
        if self._span.is_recording():
            self._spans.end(self._span, end_s, attributes)
