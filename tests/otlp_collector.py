"""An OTLP collector for tests: keeps every span that it is sent."""

from __future__ import annotations

from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Recorded:
    process: str
    name: str
    trace: str
    id: str
    parent: str
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class Collector(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Intake)
        self.spans: list[Recorded] = []

    def named(self, name: str, process: str) -> Recorded:
        (span,) = [span for span in self.spans if (span.name, span.process) == (name, process)]
        return span


class Intake(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            labels = {attribute.key: attribute.value.string_value for attribute in group.resource.attributes}
            self.server.spans += [
                Recorded(
                    process=labels["service.instance.id"],
                    name=span.name,
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    start_s=span.start_time_unix_nano / 1e9,
                    end_s=span.end_time_unix_nano / 1e9,
                )
                for scope in group.scope_spans
                for span in scope.spans
            ]
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass
