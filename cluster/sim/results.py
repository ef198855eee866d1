"""What a simulated run came to: per request while it runs, then one summary to print, compare and plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from baton.cluster.sim.trace import Arrival
from baton.router.slo import SloTargets


@dataclass(slots=True)
class Outcome:
    """How one request fares."""

    arrival: Arrival
    cached_tokens: int = 0
    num_tokens: int = 0
    first_at: float = 0.0
    last_at: float = 0.0
    max_gap_s: float = 0.0
    is_complete: bool = False
    predicted_ttft_s: float | None = None

    def take(self, now: float, num_tokens: int) -> None:
        """Tokens reach the client; of several, the last one now and the others evenly before."""
        if self.num_tokens == 0:
            self.first_at = now
        else:
            self.max_gap_s = max(self.max_gap_s, (now - self.last_at) / num_tokens)
        self.last_at = now
        self.num_tokens += num_tokens

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.arrival.time_s

    @property
    def itl_s(self) -> float:
        return (self.last_at - self.first_at) / max(self.num_tokens - 1, 1)

    def is_good(self, targets: SloTargets) -> bool:
        return self.is_complete and targets.verdict(self.ttft_s, self.itl_s) == "met"


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Quantiles:
        array = np.fromiter(values, dtype=np.float64)
        p50, p90, p99 = (round(float(q), 5) for q in np.quantile(array, (0.5, 0.9, 0.99))) if array.size else (0.0,) * 3
        return cls(p50=p50, p90=p90, p99=p99)


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Rates are requests a second over the time from the first arrival to the last."""

    policy: str
    requests: int
    refused: int
    hit_rate: float  # share of the answered requests' prompt tokens that were not computed
    ideal_hit_rate: float
    offered: float
    goodput: float
    good_share: float
    ttft_s: Quantiles
    itl_s: Quantiles  # of each request's mean
    max_gap_s: Quantiles  # of each request's longest pause
    load_spread: float  # most loaded worker's work over the mean, the largest of any role
    ttft_error: Quantiles  # |predicted - actual| / actual, where the policy predicts
    span_s: float  # to the last token


def summarise(
    policy: str, outcomes: Sequence[Outcome], work_ms: Iterable[Sequence[float]], targets: SloTargets, ideal: float
) -> Summary:
    """`work_ms` holds for each role what each of its workers has done."""
    done = [outcome for outcome in outcomes if outcome.is_complete]
    prompt_tokens = sum(outcome.arrival.prompt_len for outcome in done)
    num_good = sum(outcome.is_good(targets) for outcome in done)
    duration_s = max(outcomes[-1].arrival.time_s, 1e-9)
    return Summary(
        policy=policy,
        requests=len(outcomes),
        refused=len(outcomes) - len(done),
        hit_rate=round(sum(outcome.cached_tokens for outcome in done) / max(prompt_tokens, 1), 4),
        ideal_hit_rate=round(ideal, 4),
        offered=round(len(outcomes) / duration_s, 3),
        goodput=round(num_good / duration_s, 3),
        good_share=round(num_good / len(outcomes), 4),
        ttft_s=Quantiles.of(outcome.ttft_s for outcome in done),
        itl_s=Quantiles.of(outcome.itl_s for outcome in done if outcome.num_tokens > 1),
        max_gap_s=Quantiles.of(outcome.max_gap_s for outcome in done if outcome.num_tokens > 1),
        load_spread=round(max(max(work) * len(work) / max(sum(work), 1e-9) for work in work_ms if work), 3),
        ttft_error=Quantiles.of(
            abs(outcome.predicted_ttft_s - outcome.ttft_s) / outcome.ttft_s
            for outcome in done
            if outcome.predicted_ttft_s is not None
        ),
        span_s=round(max((outcome.last_at for outcome in done), default=0.0), 1),
    )
