"""One panel of a dashboard, and the queries that many have in common. `$__rate_interval` is Grafana's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

R = "$__rate_interval"


class Query(NamedTuple):
    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str  # Grafana's name of it
    means: str
    queries: tuple[Query, ...]
    stacked: bool = False


def rates(metric: str, by: str, selector: str = "") -> Query:
    return Query(f"sum by ({by}) (rate({metric}{selector}[{R}]))", "{{" + by + "}}")


def quantiles(metric: str, *shares: float, selector: str = "") -> tuple[Query, ...]:
    rate = f"sum by (le) (rate({metric}_bucket{selector}[{R}]))"
    return tuple(Query(f"histogram_quantile({share}, {rate})", f"p{share * 100:g}") for share in shares)


def mean(metric: str, by: str) -> Query:
    return Query(
        f"sum by ({by}) (rate({metric}_sum[{R}])) / sum by ({by}) (rate({metric}_count[{R}]))", "{{" + by + "}}"
    )


def by_role(expr: str) -> str:
    """Give a worker's series the role that it has now."""
    return f"({expr}) * on (worker) group_left (role) baton_worker_info"
