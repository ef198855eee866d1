"""What the dashboards show of the workers; `panels.py` has the others."""

from __future__ import annotations

from baton.cluster.panel import Panel, Query, R, by_role, mean, quantiles, rates

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

SPECULATION = (
    Panel(
        "Tokens a step",
        "short",
        "that a sequence gets from a step that verified drafts for it: 1 and the drafts that counted, by worker",
        (
            Query(
                f"1 + sum by (worker) (rate(baton_accepted_draft_tokens_total[{R}]))"
                f' / sum by (worker) (rate(baton_draft_tokens_total{{place="1"}}[{R}]))',
                "{{worker}}",
            ),
        ),
    ),
    Panel(
        "Acceptance",
        "percentunit",
        "drafts that counted, of those verified, by place in the draft",
        (
            Query(
                f"sum by (place) (rate(baton_accepted_draft_tokens_total[{R}]))"
                f" / sum by (place) (rate(baton_draft_tokens_total[{R}]))",
                "place {{place}}",
            ),
        ),
    ),
    Panel(
        "Drafts verified",
        "short",
        "a second, by worker",
        (rates("baton_draft_tokens_total", "worker"),),
    ),
    Panel(
        "Drafts wasted",
        "short",
        "verified and not taken, a second, by worker: arithmetic that bought nothing",
        (
            Query(
                f"sum by (worker) (rate(baton_draft_tokens_total[{R}]))"
                f" - sum by (worker) (rate(baton_accepted_draft_tokens_total[{R}]))",
                "{{worker}}",
            ),
        ),
    ),
)
