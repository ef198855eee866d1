"""What the router decided and how right its predictions were, as Prometheus series."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

DECISION_BUCKETS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)
ERROR_BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0)
PREDICTED_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)


class RoutingMetrics:
    """`path`: `disaggregated` or `alone`. Times count from the decision on, so the gateway's own queue is not in."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._decisions = Counter(
            "baton_router_decisions", "Requests sent to workers, by path", ("path",), registry=registry
        )
        self._seconds = Histogram(
            "baton_router_decision_seconds", "Time to choose workers", buckets=DECISION_BUCKETS, registry=registry
        )
        self._predicted = Histogram(
            "baton_router_predicted_ttft_seconds",
            "Time to first token as predicted when it was routed",
            buckets=PREDICTED_BUCKETS,
            registry=registry,
        )
        self._actual = Histogram(
            "baton_router_actual_ttft_seconds",
            "The same, as it came",
            buckets=PREDICTED_BUCKETS,
            registry=registry,
        )
        self._error = Histogram(
            "baton_router_ttft_error_ratio",
            "|predicted - actual| / actual time to first token",
            buckets=ERROR_BUCKETS,
            registry=registry,
        )

    def decided(self, seconds: float, *, is_disaggregated: bool) -> None:
        self._decisions.labels("disaggregated" if is_disaggregated else "alone").inc()
        self._seconds.observe(seconds)

    def first_token(self, predicted_s: float | None, actual_s: float) -> None:
        if predicted_s is None or actual_s <= 0:
            return
        self._predicted.observe(predicted_s)
        self._actual.observe(actual_s)
        self._error.observe(abs(predicted_s - actual_s) / actual_s)
