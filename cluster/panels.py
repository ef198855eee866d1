"""What the dashboards show, as data: each panel's queries with what they mean. `dashboards.py` makes Grafana's JSON.

Series are explained in deploy/README.md.
"""

from __future__ import annotations

from baton.cluster.panel import Panel, Query, R, quantiles, rates
from baton.cluster.panels_workers import CACHE, HANDOVER, SPECULATION, WORKERS

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
    "Speculation": SPECULATION,
    "Router": ROUTER,
    "Tenants": TENANTS,
    "Planner": PLANNER,
}
