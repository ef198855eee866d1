"""Routing policies on simulated H200s, as tables, JSON and pictures under tests/bench/results.

python tests/bench/routing_sim.py policies DATA [--requests N --skip N]
python tests/bench/routing_sim.py cache DATA                     hit rate and spread with room for every prefix
python tests/bench/routing_sim.py planner DATA                   static splits and a planned one, from code to chat
python tests/bench/routing_sim.py conditional                    prefill apart, never, or as the cost policy chooses

DATA holds mooncake/ and azure/ as their projects publish them (see tests/data/SOURCES.md). The simulator's own file
says what it simplifies. Conversation arrivals are spread within their timestamp's 3 s.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from baton.actors.messages import Role
from baton.cluster.bench.plot import pyplot
from baton.cluster.planner import Goals
from baton.cluster.sim.planned import PlannedSimulation
from baton.cluster.sim.results import Outcome, Summary
from baton.cluster.sim.simulation import Setup, Simulation, simulate
from baton.cluster.sim.trace import ID_TOKENS, Arrival, read_trace, scaled, spread
from baton.cluster.sim.worker import Profile
from baton.router.config import PolicyName, RouterConfig
from baton.router.slo import SloTargets

RESULTS = Path(__file__).parent / "results"
TARGETS = SloTargets("sim", ttft_s=5.0, itl_s=0.1)
TIGHT = SloTargets("sim", ttft_s=1.0, itl_s=0.02)  # so that it matters where prompts are prefilled
TRACES = {  # file, times as fast as recorded: light, busy, at capacity or beyond for eight workers
    "mooncake conversation": ("mooncake/conversation_trace.first4000.jsonl.gz", (2, 4.5, 6)),
    "mooncake synthetic": ("mooncake/synthetic_trace.first1500.jsonl.gz", (2.5, 6, 8)),
    "azure code": ("azure/AzureLLMInferenceTrace_code.first4409.csv.gz", (20, 60, 100)),
    "azure conversation": ("azure/AzureLLMInferenceTrace_conv.first9683.csv.gz", (80, 120, 160)),
}
CODE_SPEED, CHAT_SPEED = 15, 30  # for six workers: the best split of each serves nearly all
COMPARED = ("cost", "cache_aware", "dynamo", "least_loaded", "round_robin")


def run(
    policy: str,
    workers: dict[Role, int],
    arrivals: Sequence[Arrival],
    *,
    kv_tokens: int | None = None,
    targets: SloTargets = TARGETS,
    block_size: int = ID_TOKENS,
) -> Summary:
    profile = Profile.load()
    if kv_tokens is not None:
        profile = msgspec.structs.replace(profile, kv_tokens=kv_tokens)
    config = RouterConfig(policy=PolicyName(policy))
    setup = Setup(workers=workers, router=config, profile=profile, targets=targets, block_size=block_size)
    return simulate(setup, arrivals)


def load(data: Path, name: str, speed: float, num_requests: int | None = None, skip: int = 0) -> list[Arrival]:
    """Leave out the first `skip`, or fewer where the trace would not give `num_requests` then."""
    arrivals = spread(read_trace(data / TRACES[name][0]))
    skip = max(min(skip, len(arrivals) - (num_requests or 0)), 0) if num_requests else skip
    chosen = arrivals[skip:][:num_requests]
    return scaled([replace(arrival, time_s=arrival.time_s - chosen[0].time_s) for arrival in chosen], speed)


def policies(data: Path, num_requests: int | None, skip: int) -> None:
    """Write the goodput of each policy on each trace and load."""
    rows: list[dict[str, Any]] = []
    table = Table("trace", "speed", "offered/s", *COMPARED, title="share of requests within targets (hit rate)")
    for name, (_, speeds) in TRACES.items():
        for speed in speeds:
            arrivals = load(data, name, speed, num_requests, skip)
            runs = [run(policy, {"both": 8}, arrivals) for policy in COMPARED]
            rows += [{"trace": name, "speed": speed, **msgspec.to_builtins(summary)} for summary in runs]
            cells = [f"{summary.good_share:.3f} ({summary.hit_rate:.3f})" for summary in runs]
            table.add_row(name, str(speed), f"{runs[0].offered:.1f}", *cells)
            print(name, speed, cells, flush=True)
    Console(width=160).print(table)
    write("routing-policies", {"ttft_s": TARGETS.ttft_s, "itl_s": TARGETS.itl_s, "rows": rows})
    draw_policies(rows)


def cache(data: Path) -> None:
    """Write how near the hit rate comes to that of one endless cache, where nothing must be evicted."""
    arrivals = load(data, "mooncake conversation", 3)
    rows = [msgspec.to_builtins(run(policy, {"both": 8}, arrivals, kv_tokens=8_000_000)) for policy in COMPARED]
    for row in rows:
        share = row["hit_rate"] / row["ideal_hit_rate"]
        print(f"{row['policy']:12} hits {row['hit_rate']:.4f} = {share:.1%} of ideal, spread {row['load_spread']:.3f}")
    write("routing-cache", {"speed": 3, "kv_tokens": 8_000_000, "rows": rows})


def made_up(prompt_len: int, output_len: int, rate: float, seconds: float) -> list[Arrival]:
    """Poisson arrivals of prompts that share nothing; lengths vary by a fifth either way."""
    chance = random.Random(7)
    arrivals: list[Arrival] = []
    now, next_id = 0.0, 1
    while (now := now + chance.expovariate(rate)) < seconds:
        length = round(prompt_len * chance.uniform(0.8, 1.2))
        num_ids = -(-length // ID_TOKENS)
        output = max(round(output_len * chance.uniform(0.8, 1.2)), 1)
        arrivals.append(Arrival(now, length, output, tuple(range(next_id, next_id + num_ids))))
        next_id += num_ids
    return arrivals


def capacity(prompt_len: int, output_len: int, num_workers: int) -> float:
    """Requests a second that keep `num_workers` busy, decoding in batches of 32: what loads are fractions of."""
    cost = Profile.load().cost_ms
    prefill_ms = prompt_len * (cost["prefill_token_ms"] + cost["prefill_context_ms"] * prompt_len / 2)
    kv_ms = cost["decode_token_ms"] * (prompt_len + output_len / 2)
    return 1e3 * num_workers / (prefill_ms + output_len * (cost["constant_ms"] / 32 + cost["decode_ms"] + kv_ms))


def conditional(num_workers: int = 4) -> None:
    """Write goodput over prompt length, output length and load: 2P2D always apart, 4 workers never, 4 workers by cost.

    Blocks are small, as one that D lacks is computed by D itself and not handed over.
    """
    rows: list[dict[str, Any]] = []
    half = num_workers // 2
    split: dict[Role, int] = {"prefill": half, "decode": num_workers - half}
    both: dict[Role, int] = {"both": num_workers}
    for prompt_len in (512, 2048, 8192):
        for output_len in (16, 128, 512):
            for share in (0.5, 0.8, 1.1):
                rate = share * capacity(prompt_len, output_len, num_workers)
                arrivals = made_up(prompt_len, output_len, rate, max(300 / rate, 20.0))
                fleets = {"apart": ("least_loaded", split), "alone": ("least_loaded", both), "cost": ("cost", both)}
                goodput = {
                    name: run(policy, workers, arrivals, targets=TIGHT, block_size=64).goodput
                    for name, (policy, workers) in fleets.items()
                }
                row = {"prompt": prompt_len, "output": output_len, "load": share, "requests": len(arrivals), **goodput}
                rows.append(row)
                print(json.dumps(row), flush=True)
    write("routing-conditional", {"workers": num_workers, "rows": rows})
    draw_conditional(rows)


def planner(data: Path, policy: str = "least_loaded", num_workers: int = 6) -> None:
    """Write goodput of each static split and of a planned one, before and after the work changes its kind."""
    code = load(data, "azure code", CODE_SPEED, 2500)
    switch_s = code[-1].time_s + 0.1
    chat = [
        replace(arrival, time_s=arrival.time_s + switch_s)
        for arrival in load(data, "azure conversation", CHAT_SPEED, 6000)
    ]
    goals = Goals(ttft_ms=2000, itl_ms=50)
    targets = SloTargets("sim", goals.ttft_ms / 1e3, goals.itl_ms / 1e3)
    shares: dict[str, list[float]] = {}
    for num_prefill in range(1, num_workers):
        simulation = Simulation(split_setup(policy, num_prefill, num_workers, targets))
        simulation.run([*code, *chat])
        shares[f"{num_prefill}P{num_workers - num_prefill}D"] = good_by_phase(simulation.outcomes, switch_s, targets)
        print(f"{num_prefill}P", shares[f"{num_prefill}P{num_workers - num_prefill}D"], flush=True)
    planned = PlannedSimulation(split_setup(policy, num_workers // 2, num_workers, targets), goals)
    planned.run([*code, *chat])
    shares["planned"] = good_by_phase(planned.outcomes, switch_s, targets)
    moves = [
        (round(now, 1), str(decision.split), decision.reasons[-1].because)
        for now, decision in planned.decisions
        if decision.reasons[-1].what == "move"
    ]
    best = [max(share[phase] for name, share in shares.items() if name != "planned") for phase in (0, 1)]
    table = Table("split", "code", "conversation", "of the best, both", title=f"share within targets, {policy}")
    of_best: dict[str, float] = {}
    for name, share in shares.items():
        of_best[name] = min(share[phase] / best[phase] for phase in (0, 1))
        table.add_row(name, *(f"{value:.3f}" for value in share), f"{of_best[name]:.1%}")
    Console(width=100).print(table)
    for move in moves:
        print(*move)
    write(f"planner-{policy}", {"switch_s": switch_s, "shares": shares, "of_best": of_best, "moves": moves})


def split_setup(policy: str, num_prefill: int, num_workers: int, targets: SloTargets) -> Setup:
    return Setup(
        workers={"prefill": num_prefill, "decode": num_workers - num_prefill},
        router=RouterConfig(policy=PolicyName(policy)),
        profile=Profile.load(),
        targets=targets,
        block_size=128,
    )


def good_by_phase(outcomes: Sequence[Outcome], switch_s: float, targets: SloTargets) -> list[float]:
    phases = (
        [o for o in outcomes if o.arrival.time_s < switch_s],
        [o for o in outcomes if o.arrival.time_s >= switch_s],
    )
    return [round(sum(outcome.is_good(targets) for outcome in phase) / len(phase), 4) for phase in phases]


def write(name: str, result: dict[str, Any]) -> None:
    path = RESULTS / f"{name}-{time.strftime('%Y-%m-%d')}.json"
    path.write_text(json.dumps({"profile": Profile.load().source, **result}, indent=1) + "\n")
    print(path)


def draw_policies(rows: Sequence[dict[str, Any]]) -> None:
    figure, axes = pyplot().subplots(1, len(TRACES), figsize=(18, 4), layout="constrained", sharey=True)
    for axis, name in zip(axes, TRACES, strict=True):
        for policy in COMPARED:
            mine = [row for row in rows if row["trace"] == name and row["policy"] == policy]
            axis.plot([row["offered"] for row in mine], [row["good_share"] for row in mine], "o-", label=policy)
        axis.set(title=name, xlabel="requests a second")
    axes[0].set(ylabel="share within targets")
    axes[0].legend()
    figure.savefig(RESULTS / "routing-policies.png", dpi=110)


def draw_conditional(rows: Sequence[dict[str, Any]]) -> None:
    prompts, outputs = (sorted({row[key] for row in rows}) for key in ("prompt", "output"))
    loads = sorted({row["load"] for row in rows})
    figure, axes = pyplot().subplots(1, len(loads), figsize=(5 * len(loads), 4), layout="constrained")
    for axis, share in zip(axes, loads, strict=True):
        cells = {(row["prompt"], row["output"]): row for row in rows if row["load"] == share}
        grid = [[ratio(cells[prompt, output]) for prompt in prompts] for output in outputs]
        axis.imshow(grid, vmin=0.9, vmax=1.1, cmap="RdYlGn", origin="lower")
        for y, line in enumerate(grid):
            for x, value in enumerate(line):
                axis.text(x, y, f"{value:.2f}", ha="center", va="center")
        axis.set(title=f"load {share}", xlabel="prompt tokens", ylabel="output tokens")
        axis.set_xticks(range(len(prompts)), prompts)
        axis.set_yticks(range(len(outputs)), outputs)
    figure.suptitle("goodput of the cost policy over the better of always apart and never")
    figure.savefig(RESULTS / "routing-conditional.png", dpi=110)


def ratio(row: dict[str, Any]) -> float:
    return row["cost"] / max(row["apart"], row["alone"], 1e-9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("policies", "cache", "conditional", "planner"))
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--requests", type=int, default=None, help="of each trace; all if left out")
    parser.add_argument("--skip", type=int, default=0, help="requests of each trace: what weights were chosen on")
    parser.add_argument("--policy", default="least_loaded", help="of the planner's fleet")
    arguments = parser.parse_args()
    if arguments.what == "conditional":
        conditional()
    elif arguments.data is None:
        parser.error(f"{arguments.what} needs the folder of the traces")
    elif arguments.what == "planner":
        planner(arguments.data, arguments.policy)
    elif arguments.what == "cache":
        cache(arguments.data)
    else:
        policies(arguments.data, arguments.requests, arguments.skip)


if __name__ == "__main__":
    main()
