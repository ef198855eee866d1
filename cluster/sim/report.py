"""Summaries of simulated runs as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from baton.cluster.bench.plot import pyplot
from baton.cluster.sim.results import Quantiles, Summary


def as_table(summaries: Sequence[Summary]) -> Table:
    first = summaries[0]
    table = Table(title=f"{first.requests} requests, {first.offered:.2f} a second")
    table.add_column("policy")
    for name in ("goodput/s", "good", "refused", "hits", "TTFT p50/p90/p99 s", "ITL p50/p90/p99 ms", "spread", "error"):
        table.add_column(name, justify="right")
    for run in summaries:
        table.add_row(
            run.policy,
            f"{run.goodput:.2f}",
            f"{run.good_share:.1%}",
            str(run.refused),
            f"{run.hit_rate:.1%} of {run.ideal_hit_rate:.1%}",
            _row(run.ttft_s, 1, 2),
            _row(run.itl_s, 1000, 1),
            f"{run.load_spread:.2f}",
            f"{run.ttft_error.p50:.0%}" if run.ttft_error.p50 else "",
        )
    return table


def plot(summaries: Sequence[Summary], path: Path) -> None:
    """Draw one group of bars a figure of merit: goodput, hits, TTFT, ITL; one bar a policy."""
    figure, axes = pyplot().subplots(1, 4, figsize=(16, 4), layout="constrained")
    names = [run.policy for run in summaries]
    _bars(axes[0], names, [run.goodput for run in summaries], "requests within targets, a second")
    axes[0].axhline(summaries[0].offered, linestyle="--", color="tab:gray")
    _bars(axes[1], names, [run.hit_rate for run in summaries], "share of prompt tokens from the cache")
    axes[1].axhline(summaries[0].ideal_hit_rate, linestyle="--", color="tab:gray")
    _bars(axes[2], names, [run.ttft_s.p90 for run in summaries], "time to first token, p90, s")
    _bars(axes[3], names, [1e3 * run.itl_s.p90 for run in summaries], "mean time between tokens, p90, ms")
    figure.savefig(path, dpi=120)


def _bars(axes: Any, names: Sequence[str], values: Sequence[float], title: str) -> None:
    axes.barh(names, values, color=["tab:orange" if name == "cost" else "tab:blue" for name in names])
    axes.invert_yaxis()
    axes.set(title=title)


def _row(quantiles: Quantiles, scale: float, digits: int) -> str:
    return " / ".join(f"{scale * value:.{digits}f}" for value in (quantiles.p50, quantiles.p90, quantiles.p99))
