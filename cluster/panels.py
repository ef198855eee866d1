"""What the dashboards show, as data: each panel's queries with what they mean. `dashboards.py` makes Grafana's JSON.

`$__rate_interval` is Grafana's. Series are explained in deploy/README.md.
"""

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


OVERVIEW = (
    Panel(
        "Goodput",
        "short",
        "tokens a second of sequences that met their targets, and of all",
        (
            Query(f"sum(rate(baton_gateway_goodput_tokens_total[{R}]))", "met"),
            Query(f"sum(rate(baton_gateway_output_tokens_total[{R}]))", "all"),
        ),
    ),
    Panel(
        "Share within targets",
        "percentunit",
        "sequences that met the TTFT and ITL targets of their class; the rest missed them, were refused or failed",
        (Query("slo:met:ratio_rate5m", "{{slo}}"),),
    ),
    Panel(
        "Time to first token",
        "s",
        "from the request read to its first token sent",
        quantiles("baton_gateway_ttft_seconds", 0.5, 0.9, 0.99),
    ),
    Panel(
        "Inter-token latency",
        "s",
        "between two outputs of a sequence",
        quantiles("baton_gateway_itl_seconds", 0.5, 0.9, 0.99),
    ),
    Panel(
        "End to end", "s", "from the request read to its last token", quantiles("baton_gateway_e2e_seconds", 0.5, 0.99)
    ),
    Panel(
        "Requests",
        "reqps",
        "answered, by HTTP status; 499 is a client that left",
        (rates("baton_gateway_requests_total", "status"),),
        stacked=True,
    ),
    Panel(
        "Load",
        "short",
        "requests in progress at the gateways; sequences that wait on workers",
        (
            Query("sum(baton_gateway_running_requests)", "in progress"),
            Query('sum(baton_sequences{state="waiting"})', "waiting on workers"),
        ),
    ),
    Panel(
        "Tokens",
        "short",
        "prompt tokens taken in and tokens sent, a second",
        (
            Query(f"sum(rate(baton_gateway_prompt_tokens_total[{R}]))", "prompt"),
            Query(f"sum(rate(baton_gateway_output_tokens_total[{R}]))", "output"),
        ),
    ),
    Panel(
        "Workers",
        "short",
        "wanted and serving, by role",
        (Query("baton_workers_desired", "wanted {{role}}"), Query("baton_workers_ready", "serving {{role}}")),
    ),
    Panel(
        "Restarts",
        "short",
        "processes that were begun anew in the last ten minutes",
        (Query("sum by (process) (increase(baton_process_restarts_total[10m]))", "{{process}}"),),
    ),
)

WORKERS = (
    Panel(
        "Where the first token's time goes",
        "s",
        "mean of each phase, as the workers measure it; the hand-over delays the second token, not the first",
        (mean("baton_gateway_phase_seconds", "phase"),),
        stacked=True,
    ),
    Panel(
        "Queue on the worker that prefills",
        "s",
        "accepted to first chunk",
        quantiles("baton_phase_seconds", 0.5, 0.99, selector='{phase="queue"}'),
    ),
    Panel(
        "Step time",
        "s",
        "mean of an engine's step, by worker",
        (mean("baton_step_seconds", "worker"),),
    ),
    Panel(
        "Step time, slow end",
        "s",
        "of all workers' steps",
        quantiles("baton_step_seconds", 0.5, 0.99),
    ),
    Panel(
        "Idle share",
        "percentunit",
        "of time in which the engine had nothing to compute, by worker",
        (Query(f"1 - clamp_max(rate(baton_engine_busy_seconds_total[{R}]), 1)", "{{worker}}"),),
    ),
    Panel(
        "Computed tokens",
        "short",
        "positions computed a second: chunks of prompts and decode steps, by role",
        (Query(f"sum by (role, kind) ({by_role(f'rate(baton_computed_tokens_total[{R}])')})", "{{role}}: {{kind}}"),),
    ),
    Panel(
        "Arithmetic in use (MFU)",
        "percentunit",
        "estimated FLOPs over the most that the device was measured to do",
        (Query(f"rate(baton_model_flops_total[{R}]) / baton_device_flops_per_second", "{{worker}}"),),
    ),
    Panel(
        "Bandwidth in use (MBU)",
        "percentunit",
        "estimated memory traffic over the most that the device was measured to copy",
        (Query(f"rate(baton_model_bytes_total[{R}]) / baton_device_bytes_per_second", "{{worker}}"),),
    ),
    Panel(
        "Sequences",
        "short",
        "running and waiting, by worker",
        (Query("baton_sequences", "{{worker}} {{state}}"),),
    ),
    Panel(
        "Prompt tokens to compute",
        "short",
        "not in the cache and not yet computed, by worker",
        (Query("baton_waiting_tokens", "{{worker}}"),),
    ),
)

HANDOVER = (
    Panel("Bandwidth", "Bps", "KV bytes sent a second, by worker", (rates("baton_handover_bytes_total", "worker"),)),
    Panel(
        "Bandwidth of a write",
        "Bps",
        "while something is being written",
        (
            Query(
                f"sum by (worker) (rate(baton_handover_bytes_total[{R}]))"
                f" / sum by (worker) (rate(baton_handover_write_seconds_sum[{R}]))",
                "{{worker}}",
            ),
        ),
    ),
    Panel("Write", "s", "one write to a peer", quantiles("baton_handover_write_seconds", 0.5, 0.99)),
    Panel(
        "Exposed hand-over",
        "s",
        "first token known to decode until all KV is there",
        quantiles("baton_phase_seconds", 0.5, 0.99, selector='{phase="handover"}'),
    ),
    Panel(
        "Under way",
        "short",
        "hand-overs that are not over, by side",
        (Query("sum by (side) (baton_handovers_open)", "{{side}}"),),
    ),
    Panel(
        "Given up",
        "short",
        "hand-overs that decode gave up a second: it prefills by itself then",
        (rates("baton_handover_fallbacks_total", "worker"),),
    ),
)

CACHE = (
    Panel(
        "Hit rate",
        "percentunit",
        "share of prompt tokens that need not be computed",
        (
            Query(
                f"sum(rate(baton_gateway_cached_tokens_total[{R}]))"
                f" / sum(rate(baton_gateway_prompt_tokens_total[{R}]))",
                "all",
            ),
        ),
    ),
    Panel(
        "Hit rate by worker",
        "percentunit",
        "cached over cached and computed prompt tokens, where prompts are computed",
        (
            Query(
                f"sum by (worker) (rate(baton_cached_tokens_total[{R}]))"
                f" / (sum by (worker) (rate(baton_cached_tokens_total[{R}]))"
                f' + sum by (worker) (rate(baton_computed_tokens_total{{kind="prefill"}}[{R}])))',
                "{{worker}}",
            ),
        ),
    ),
    Panel(
        "Blocks",
        "short",
        "KV blocks of all workers by state",
        (Query("sum by (state) (baton_blocks)", "{{state}}"),),
        True,
    ),
    Panel(
        "Held share",
        "percentunit",
        "blocks that sequences, imports or quarantine hold, by worker; near 1 sequences wait or are preempted",
        (Query('baton_blocks{state="held"} / on (worker) sum by (worker) (baton_blocks)', "{{worker}}"),),
    ),
)

ROUTER = (
    Panel(
        "Queue at the gateways",
        "short",
        "sequences that wait for their turn, and their prompt tokens",
        (
            Query("sum(baton_gateway_queued_requests)", "sequences"),
            Query("sum(baton_gateway_queued_tokens)", "tokens"),
        ),
    ),
    Panel(
        "Wait in that queue",
        "s",
        "until a worker has room",
        quantiles("baton_gateway_queue_wait_seconds", 0.5, 0.99),
    ),
    Panel(
        "Paths",
        "short",
        "requests sent to workers a second: prefilled by a peer, or alone where they decode",
        (rates("baton_router_decisions_total", "path"),),
        stacked=True,
    ),
    Panel(
        "Time to decide",
        "s",
        "to choose the workers of a request",
        quantiles("baton_router_decision_seconds", 0.5, 0.99),
    ),
    Panel(
        "Predicted and actual first token",
        "s",
        "means, from the decision on; with the policy cost, which predicts",
        tuple(
            Query(
                f"sum(rate(baton_router_{kind}_ttft_seconds_sum[{R}]))"
                f" / sum(rate(baton_router_{kind}_ttft_seconds_count[{R}]))",
                kind,
            )
            for kind in ("predicted", "actual")
        ),
    ),
    Panel(
        "Prediction error",
        "percentunit",
        "of single requests, as a share of what came true",
        quantiles("baton_router_ttft_error_ratio", 0.5, 0.9),
    ),
    Panel(
        "Migrations",
        "short",
        "sequences a second that went on with another worker: theirs was lost, or drained and handed them back",
        (rates("baton_gateway_migrations_total", "reason"),),
    ),
    Panel(
        "Refusals",
        "short",
        "requests answered with an error a second, by reason",
        (rates("baton_gateway_refusals_total", "reason"),),
        stacked=True,
    ),
    Panel(
        "Usable workers",
        "short",
        "that a gateway can send to; fewer than serve means lost connections",
        (Query("min by (role) (baton_gateway_workers)", "{{role}}"),),
    ),
    Panel(
        "Ends",
        "short",
        "sequences a second by how they ended",
        (rates("baton_gateway_choices_total", "finish"),),
        stacked=True,
    ),
    Panel(
        "Gateways",
        "short",
        "requests in progress, by gateway",
        (Query("baton_gateway_running_requests", "{{process}}"),),
    ),
)

TENANTS = (
    Panel(
        "Targets by class",
        "short",
        "sequences a second by class and outcome: met, the target that was missed, refused, failed",
        (Query(f"sum by (slo, outcome) (rate(baton_gateway_slo_sequences_total[{R}]))", "{{slo}}: {{outcome}}"),),
        stacked=True,
    ),
    Panel(
        "Goodput by class",
        "short",
        "tokens a second of sequences that met their targets",
        (rates("baton_gateway_goodput_tokens_total", "slo"),),
    ),
    Panel(
        "Tokens by key",
        "short",
        "prompt tokens taken in and tokens sent, a second, by API key",
        (Query(f"sum by (key, kind) (rate(baton_gateway_key_tokens_total[{R}]))", "{{key}}: {{kind}}"),),
    ),
    Panel(
        "Sequences by key",
        "short",
        "a second, by API key and outcome",
        (Query(f"sum by (key, outcome) (rate(baton_gateway_key_sequences_total[{R}]))", "{{key}}: {{outcome}}"),),
        stacked=True,
    ),
    Panel(
        "Error budget",
        "none",
        "how many times faster than allowed the budget of 1 % is used up; 1 lasts exactly",
        (Query("slo:burn:rate1h", "1 h {{slo}}"), Query("slo:burn:rate5m", "5 min {{slo}}")),
    ),
)

PLANNER = (
    Panel(
        "Prefill workers",
        "short",
        "there, best for the present workers, and as the load needs",
        (Query('baton_planner_workers{role="prefill"}', "{{kind}}"),),
    ),
    Panel(
        "Decode workers",
        "short",
        "there, best for the present workers, and as the load needs",
        (Query('baton_planner_workers{role="decode"}', "{{kind}}"),),
    ),
    Panel(
        "Load",
        "short",
        "workers' worth of work by role, forecast",
        (Query("baton_planner_load", "{{role}}"),),
    ),
    Panel(
        "Moves",
        "short",
        "workers that the planner switched in the last ten minutes, by the role that they joined",
        (Query("sum by (role) (increase(baton_planner_moves_total[10m]))", "{{role}}"),),
    ),
    Panel(
        "Quarantine",
        "short",
        "GPUs and nodes that no worker is put on until they are released",
        (Query("baton_quarantined_places", "places"),),
    ),
)

DASHBOARDS = {
    "Overview": OVERVIEW,
    "Prefill and decode": WORKERS,
    "Hand-over": HANDOVER,
    "Cache": CACHE,
    "Router": ROUTER,
    "Tenants": TENANTS,
    "Planner": PLANNER,
}
