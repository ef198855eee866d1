from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from baton.cluster.bench.client import Outcome
from baton.cluster.bench.plot import plot
from baton.cluster.bench.report import as_json, as_table, make_report
from baton.cluster.cli_options import takes


def answered(start: float, ttft_s: float, itl_s: float, num_tokens: int = 11) -> Outcome:
    first = start + ttft_s
    last = first + itl_s * (num_tokens - 1)
    return Outcome(start, start, 100, 200, first=first, last=last, ended=last, num_tokens=num_tokens, cached_tokens=40)


OUTCOMES = [
    answered(0.0, 0.1, 0.01),
    answered(1.0, 0.9, 0.01),  # its first token came late
    answered(2.0, 0.1, 0.09),  # its tokens came slowly
    Outcome(3.0, 3.0, 100, 429, "full", ended=3.02),
    Outcome(4.0, 4.5, 100, 200, "broken", first=4.6, last=9.0, ended=10.0, num_tokens=5),
]


def test_goodput_counts_only_what_met_both_targets() -> None:
    report = make_report(OUTCOMES, 0.5, 0.05)
    assert (report.num_ok, report.num_refused, report.num_failed) == (3, 1, 1)
    assert report.duration_s == 10.0
    assert (report.goodput_requests, report.goodput_tokens, report.good_share) == (0.1, 1.1, 0.2)
    assert (report.requests_per_s, report.output_tokens_per_s) == (0.3, 3.3)
    assert report.cached_share == 0.4
    assert report.errors == {"429: full": 1, "200: broken": 1}
    assert report.ttft_ms is not None and report.ttft_ms.p50 == pytest.approx(100.0)
    assert report.itl_ms is not None and report.itl_ms.p50 == pytest.approx(10.0)
    assert report.refusal_ms is not None and report.refusal_ms.p99 == pytest.approx(20.0)
    assert report.late_ms is not None and report.late_ms.mean == pytest.approx(100.0)


def test_without_targets_every_full_answer_is_good() -> None:
    assert make_report(OUTCOMES, None, None).good_share == 0.6


def test_a_run_without_any_answer_still_reports() -> None:
    report = make_report([OUTCOMES[3]], 0.5, None)
    assert report.ttft_ms is None and report.goodput_requests == 0.0
    assert as_table(report).row_count == 2  # refusals, and how late they were sent
    assert json.loads(as_json(report, {"url": "u"}))["setting"] == {"url": "u"}


def test_a_run_is_drawn(tmp_path: Path) -> None:
    plot(OUTCOMES, 0.5, None, tmp_path / "run.svg")
    assert "time to first token" in (tmp_path / "run.svg").read_text()


def test_options_come_from_a_dataclass() -> None:
    @dataclass
    class Options:
        how_many: Annotated[int, typer.Option(min=1)] = 3

    seen: list[int] = []

    def go(options: Options) -> None:
        """Go there."""
        seen.append(options.how_many)

    app = typer.Typer()
    app.command()(takes(Options, go))
    assert CliRunner().invoke(app, []).exit_code == 0
    assert CliRunner().invoke(app, ["--how-many", "5"]).exit_code == 0
    assert CliRunner().invoke(app, ["--how-many", "0"]).exit_code == 2
    assert seen == [3, 5]
    assert "Go there." in CliRunner().invoke(app, ["--help"]).output
