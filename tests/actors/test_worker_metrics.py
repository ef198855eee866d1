from __future__ import annotations

import pytest
import torch

from baton.actors.ceilings import measure_ceilings
from baton.actors.engine.updates import BlockCounts, Update
from baton.actors.engine.work import WorkDone
from baton.actors.messages import KVEvents
from baton.actors.metrics import WorkerMetrics
from baton.actors.step_loop import StepReport


def report(*, step_s: float = 0.01, num_tokens: int = 2) -> StepReport:
    return StepReport(
        updates=(Update("r", tokens=tuple(range(num_tokens))),),
        events=KVEvents(),
        counts=BlockCounts(total=8, free=5, cached=2, held=1),
        num_running=1,
        num_waiting=3,
        waiting_tokens=40,
        waiting_context=0.0,
        prefill_share=0.0,
        cost=None,
        step_s=step_s,
    )


def value(metrics: WorkerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, {"worker": "w", **labels})


def test_state_is_read_from_the_last_report() -> None:
    metrics = WorkerMetrics("w")
    assert value(metrics, "baton_blocks", state="free") is None
    metrics.on_report(report())
    metrics.on_report(report())
    assert [value(metrics, "baton_blocks", state=state) for state in ("free", "cached", "held")] == [5, 2, 1]
    assert value(metrics, "baton_sequences", state="waiting") == 3
    assert value(metrics, "baton_waiting_tokens") == 40
    assert value(metrics, "baton_generated_tokens_total") == 4
    assert value(metrics, "baton_engine_busy_seconds_total") == pytest.approx(0.02)


def test_work_is_read_when_asked() -> None:
    metrics = WorkerMetrics("w")
    metrics.state.work = work = WorkDone()
    work.decode_tokens, work.flops = 7, 10**15
    assert value(metrics, "baton_computed_tokens_total", kind="decode") == 7
    assert value(metrics, "baton_model_flops_total") == 10**15


def test_drafts_are_counted_by_their_place() -> None:
    metrics = WorkerMetrics("w")
    assert value(metrics, "baton_draft_tokens_total", place="1") is None
    for num_accepted in (2, 0, 1):
        metrics.state.drafts.add(2, num_accepted)
    assert [value(metrics, "baton_draft_tokens_total", place=place) for place in "12"] == [3, 3]
    assert [value(metrics, "baton_accepted_draft_tokens_total", place=place) for place in "12"] == [2, 1]


def test_a_negative_delta_fails_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Entry S13: a counter that cannot take a value must not stop a step, nor spoil what is counted beside it."""
    metrics = WorkerMetrics("w")
    metrics.on_write(-1, 0.1)
    metrics.on_first_token(-5)
    metrics.on_write(10, 0.1)
    assert "on_write failed" in caplog.text and "on_first_token failed" in caplog.text
    assert value(metrics, "baton_handover_bytes_total") == 10


def test_ceilings_are_possible() -> None:
    ceilings = measure_ceilings(torch.device("cpu"), torch.float32)
    assert 1e8 < ceilings.flops_per_s < 1e14
    assert 1e7 < ceilings.bytes_per_s < 1e13
