"""A picture of a benchmark run. Needs matplotlib, which is an extra: pip install 'baton[plots]'."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from baton.cluster.bench.client import Outcome
from baton.cluster.errors import ClusterError


class NoPlots(ClusterError):
    """matplotlib is not installed."""


def check_plots() -> None:
    """Raise NoPlots now rather than after the run."""
    pyplot()


def plot(outcomes: Sequence[Outcome], ttft_s: float | None, itl_s: float | None, path: Path) -> None:
    """Draw the distributions of TTFT and ITL, and what happened over time, to `path` (.png, .svg or .pdf)."""
    figure, (ttft, itl, rates) = pyplot().subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    ok = [outcome for outcome in outcomes if outcome.fate == "ok"]
    _distribution(ttft, [o.ttft_s for o in ok if o.ttft_s is not None], ttft_s, "time to first token")
    _distribution(itl, [o.itl_s for o in ok if o.itl_s is not None], itl_s, "mean time between tokens")
    start = min(outcome.intended for outcome in outcomes)
    bins = np.arange(0, max(outcome.ended for outcome in outcomes) - start + 1)
    good = [outcome for outcome in ok if outcome.is_good(ttft_s, itl_s)]
    refused = [outcome for outcome in outcomes if outcome.fate == "refused"]
    for name, times in {
        "sent": [o.intended for o in outcomes],
        "answered": [o.ended for o in ok],
        "within targets": [o.ended for o in good],
        "refused": [o.ended for o in refused],
    }.items():
        counts, _ = np.histogram(np.asarray(times) - start, bins)
        rates.plot(bins[:-1], counts, label=name)
    rates.set(xlabel="seconds", ylabel="requests a second", title="over time")
    rates.legend()
    figure.savefig(path, dpi=120)


def _distribution(axes: Any, seconds: Sequence[float], target_s: float | None, title: str) -> None:
    milliseconds = np.sort(np.asarray(seconds)) * 1e3
    axes.plot(milliseconds, np.arange(1, len(milliseconds) + 1) / max(len(milliseconds), 1))
    if target_s is not None:
        axes.axvline(target_s * 1e3, linestyle="--", color="tab:red", label="target")
        axes.legend()
    axes.set(xlabel="ms", ylabel="share of requests", title=title, ylim=(0, 1))
    if len(milliseconds):
        axes.set_xscale("log")


def pyplot() -> Any:
    """Return matplotlib.pyplot without a display. Raises NoPlots."""
    try:
        import matplotlib
    except ImportError as error:
        raise NoPlots("plots need matplotlib: pip install 'baton[plots]'") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot
