"""`baton sim`: a trace played on simulated workers, for one routing policy or for all of them side by side."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from baton.actors.messages import Role
from baton.cluster.bench.plot import check_plots
from baton.cluster.sim.report import as_table, plot
from baton.cluster.sim.results import Summary
from baton.cluster.sim.simulation import Setup, simulate
from baton.cluster.sim.trace import Arrival, read_trace, repeated, scaled, spread
from baton.cluster.sim.worker import Profile
from baton.router.config import PolicyName, RouterConfig
from baton.router.slo import SloTargets


@dataclass(frozen=True, kw_only=True)
class SimOptions:
    trace: Annotated[Path, typer.Option(help="Mooncake .jsonl or Azure .csv, also with .gz.")]
    workers: Annotated[int | None, typer.Option(min=1, help="That prefill and decode; 8 if nothing else is said.")] = (
        None
    )
    prefill: Annotated[int, typer.Option(min=0, help="Workers that only prefill.")] = 0
    decode: Annotated[int, typer.Option(min=0, help="Workers that decode, and may prefill for themselves.")] = 0
    policy: Annotated[PolicyName, typer.Option(help="How requests are routed.")] = PolicyName.COST
    compare: Annotated[bool, typer.Option("--compare", help="All policies, one after the other.")] = False
    scale: Annotated[float, typer.Option(min=1e-6, help="Play the trace so many times as fast.")] = 1.0
    requests: Annotated[int | None, typer.Option(min=1, help="How many; the trace is repeated or cut.")] = None
    bursts: Annotated[bool, typer.Option("--bursts", help="Keep requests of one timestamp together.")] = False
    ttft_ms: Annotated[float, typer.Option(min=0.001, help="Target for goodput.")] = 5000.0
    itl_ms: Annotated[float, typer.Option(min=0.001, help="Target for the mean time between tokens.")] = 100.0
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a KV block; larger is faster to simulate.")] = 128
    profile: Annotated[Path | None, typer.Option(help="What a worker can do; as h200-llama-3.1-8b.json.")] = None
    json: Annotated[bool, typer.Option("--json", help="End with one JSON line; all else goes to stderr.")] = False
    plot: Annotated[Path | None, typer.Option(help="Draw the policies to this file (.png, .svg, .pdf).")] = None

    def arrivals(self) -> list[Arrival]:
        arrivals = read_trace(self.trace)
        if self.requests is not None:
            arrivals = repeated(arrivals, self.requests)
        return scaled(arrivals if self.bursts else spread(arrivals), self.scale)

    def setup(self, policy: PolicyName) -> Setup:
        num_both = (0 if self.prefill or self.decode else 8) if self.workers is None else self.workers
        if not num_both + self.decode:
            raise typer.BadParameter("nobody decodes: give --decode or --workers")
        counts: dict[Role, int] = {"both": num_both, "prefill": self.prefill, "decode": self.decode}
        return Setup(
            workers={role: num for role, num in counts.items() if num},
            router=RouterConfig(policy=policy),
            profile=Profile.load(self.profile),
            targets=SloTargets("sim", self.ttft_ms / 1e3, self.itl_ms / 1e3),
            block_size=self.block_size,
        )


def sim(options: SimOptions) -> None:
    """Play a trace on simulated workers, with the real router and engine, on a fake clock."""
    if options.plot is not None:
        check_plots()
    arrivals = options.arrivals()
    policies = list(PolicyName) if options.compare else [options.policy]
    console = Console(stderr=options.json)
    summaries: list[Summary] = []
    columns = (TextColumn("{task.description:13}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    started = time.perf_counter()
    with Progress(*columns, console=console) as progress:
        for policy in policies:
            setup = options.setup(policy)
            task = progress.add_task(policy.value, total=len(arrivals))
            summaries.append(simulate(setup, arrivals, lambda task=task: progress.advance(task)))
    seconds = time.perf_counter() - started
    console.print(as_table(summaries))
    console.print(f"{len(arrivals) * len(summaries) / seconds:,.0f} requests a second were simulated")
    if options.plot is not None:
        plot(summaries, options.plot)
    if options.json:
        result = {"policies": summaries} if options.compare else summaries[0]
        typer.echo(msgspec.json.encode(result).decode())
