from __future__ import annotations

import pytest

from baton.actors.messages import PhaseTimes
from baton.router.metrics import Metrics


def test_a_recording_that_fails_does_not_raise(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    metrics.output(-1, None)  # a counter cannot go down
    metrics.ended("chat", 200, "soon")  # type: ignore[arg-type]
    assert "output failed" in caplog.text


def test_what_was_recorded_is_rendered() -> None:
    metrics = Metrics()
    metrics.started()
    metrics.first_output(0.003, prompt_tokens=100, cached_tokens=64)
    metrics.output(3, 0.005)
    metrics.phases(PhaseTimes(queue_s=0.1, prefill_s=0.2, handover_s=0.3, first_step_s=0.4))
    metrics.ended("chat", 429, 0.1)
    metrics.refused("overloaded")
    text = metrics.render().decode()
    for line in (
        'baton_gateway_ttft_seconds_bucket{le="0.005"} 1.0',
        "baton_gateway_cached_tokens_total 64.0",
        "baton_gateway_output_tokens_total 3.0",
        'baton_gateway_phase_seconds_sum{phase="handover"} 0.3',
        'baton_gateway_requests_total{endpoint="chat",status="429"} 1.0',
        'baton_gateway_refusals_total{reason="overloaded"} 1.0',
        "baton_gateway_running_requests 0.0",
    ):
        assert line in text


def test_two_gateways_in_one_process_do_not_share_a_registry() -> None:
    assert Metrics().registry is not Metrics().registry
