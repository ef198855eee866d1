"""OpenTelemetry spans, recorded after the fact: a path that serves requests never waits for tracing.

Times are `time.monotonic()` of this process. A context is a W3C traceparent, "" where nothing is recorded.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from baton.actors.config import TracingConfig

Attribute = str | int | float


class Span(Protocol):
    @property
    def context(self) -> str:
        """What its children name as their parent."""
        ...

    def end(self, end_s: float | None = None, **attributes: Attribute) -> None:
        """Idempotent."""
        ...


class Spans(Protocol):
    def open(self, name: str, parent: str, start_s: float) -> Span:
        """Begin a span whose context others need before it ends. Without `parent` it begins a trace."""
        ...

    def record(self, name: str, parent: str, start_s: float, end_s: float, **attributes: Attribute) -> None:
        """Record a span that is over; nothing without `parent`."""
        ...

    def close(self) -> None:
        """Send what is left; blocks for as long as the collector takes, a few seconds at most."""
        ...


@dataclass(frozen=True, slots=True)
class NoSpan:
    context: str = ""

    def end(self, end_s: float | None = None, **attributes: Attribute) -> None:
        pass


class NoSpans:
    def open(self, name: str, parent: str, start_s: float) -> Span:
        return NoSpan()

    def record(self, name: str, parent: str, start_s: float, end_s: float, **attributes: Attribute) -> None:
        pass

    def close(self) -> None:
        pass


def make_spans(config: TracingConfig, process: str) -> Spans:
    if config.otlp_endpoint is None:
        return NoSpans()
    from baton.actors.spans_otel import OtelSpans

    return OtelSpans(config, process)


def monotonic_offset_ns() -> int:
    """Return what must be added to this process's monotonic time to make it the time of day."""
    return time.time_ns() - time.monotonic_ns()
