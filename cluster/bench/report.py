"""What a benchmark run shows: latencies, throughput, and goodput, which counts only what met its targets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from rich.table import Table

from baton.cluster.bench.client import Outcome

QUANTILES = (50, 90, 99)


class Latency(msgspec.Struct, frozen=True):
    """Milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Rates are a second of `duration_s`, from the first request's intended time to the last one's end."""

    duration_s: float
    num_requests: int
    num_ok: int
    num_refused: int
    num_failed: int
    errors: dict[str, int]
    ttft_target_ms: float | None
    itl_target_ms: float | None
    goodput_requests: float
    goodput_tokens: float
    good_share: float  # of all requests, refused ones too
    requests_per_s: float  # answered in full
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    cached_share: float  # of the prompt tokens of answered requests
    ttft_ms: Latency | None
    itl_ms: Latency | None  # a request's mean time between tokens
    gap_ms: Latency | None  # between any two events with text
    e2e_ms: Latency | None
    refusal_ms: Latency | None  # from sent to refused
    late_ms: Latency | None  # how late this client sent: large values mean that it was the bottleneck


def make_report(outcomes: Sequence[Outcome], ttft_s: float | None, itl_s: float | None) -> Report:
    ok = [outcome for outcome in outcomes if outcome.fate == "ok"]
    good = [outcome for outcome in ok if outcome.is_good(ttft_s, itl_s)]
    refused = [outcome for outcome in outcomes if outcome.fate == "refused"]
    failed = [outcome for outcome in outcomes if outcome.fate == "failed"]
    seconds = max(o.ended for o in outcomes) - min(o.intended for o in outcomes) if outcomes else 0.0
    prompt_tokens = sum(outcome.prompt_len for outcome in ok)

    def rate(amount: float) -> float:
        return amount / seconds if seconds else 0.0

    return Report(
        duration_s=seconds,
        num_requests=len(outcomes),
        num_ok=len(ok),
        num_refused=len(refused),
        num_failed=len(failed),
        errors=dict(Counter(f"{o.status or 'no answer'}: {o.error}" for o in (*failed, *refused)).most_common(5)),
        ttft_target_ms=None if ttft_s is None else ttft_s * 1e3,
        itl_target_ms=None if itl_s is None else itl_s * 1e3,
        goodput_requests=rate(len(good)),
        goodput_tokens=rate(sum(outcome.num_tokens for outcome in good)),
        good_share=len(good) / len(outcomes) if outcomes else 0.0,
        requests_per_s=rate(len(ok)),
        output_tokens_per_s=rate(sum(outcome.num_tokens for outcome in ok)),
        prompt_tokens_per_s=rate(prompt_tokens),
        cached_share=sum(outcome.cached_tokens for outcome in ok) / prompt_tokens if prompt_tokens else 0.0,
        ttft_ms=latency([o.ttft_s for o in ok if o.ttft_s is not None]),
        itl_ms=latency([o.itl_s for o in ok if o.itl_s is not None]),
        gap_ms=latency([gap for outcome in ok for gap in outcome.gaps]),
        e2e_ms=latency([outcome.ended - outcome.intended for outcome in ok]),
        refusal_ms=latency([outcome.ended - outcome.sent for outcome in refused]),
        late_ms=latency([outcome.sent - outcome.intended for outcome in outcomes]),
    )


def latency(seconds: Sequence[float]) -> Latency | None:
    if not seconds:
        return None
    milliseconds = np.asarray(seconds) * 1e3
    p50, p90, p99 = (float(value) for value in np.percentile(milliseconds, QUANTILES))
    return Latency(float(milliseconds.mean()), p50, p90, p99)


def as_table(report: Report) -> Table:
    table = Table(
        "", "mean", *(f"p{quantile}" for quantile in QUANTILES), title=_headline(report), caption=_notes(report)
    )
    rows = {
        "time to first token, ms": report.ttft_ms,
        "time between tokens, ms": report.itl_ms,
        "gap between events, ms": report.gap_ms,
        "whole request, ms": report.e2e_ms,
        "refusal, ms": report.refusal_ms,
        "sent late by, ms": report.late_ms,
    }
    for name, row in rows.items():
        if row is not None:
            table.add_row(name, *(f"{value:,.1f}" for value in (row.mean, row.p50, row.p90, row.p99)))
    return table


def as_json(report: Report, setting: dict[str, Any]) -> bytes:
    """Return one line."""
    return msgspec.json.encode({"setting": setting, **msgspec.to_builtins(report)})


def _headline(report: Report) -> str:
    return (
        f"{report.num_ok} of {report.num_requests} answered in {report.duration_s:.1f} s "
        f"({report.num_refused} refused, {report.num_failed} failed): {report.requests_per_s:.2f} requests/s, "
        f"{report.output_tokens_per_s:,.0f} output tokens/s, {report.cached_share:.0%} of prompts cached"
    )


def _notes(report: Report) -> str:
    targets = [
        f"{name} {target:g} ms"
        for name, target in (("TTFT", report.ttft_target_ms), ("ITL", report.itl_target_ms))
        if target is not None
    ]
    lines = [
        f"goodput under {' and '.join(targets) or 'no targets'}: {report.goodput_requests:.2f} requests/s, "
        f"{report.goodput_tokens:,.0f} tokens/s, {report.good_share:.1%} of all requests",
        *(f"{number} x {error}" for error, number in report.errors.items()),
    ]
    return "\n".join(lines)
