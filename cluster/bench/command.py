"""`baton bench`: load on any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from baton.cluster.bench.client import Client, Outcome, find_model
from baton.cluster.bench.load import Job, Lengths, Scale, Tokens, arrival_times, made_up_jobs, trace_jobs
from baton.cluster.bench.plot import check_plots, plot
from baton.cluster.bench.report import as_json, as_table, make_report
from baton.cluster.bench.run import run_closed, run_open

FIRST_TOKEN = 1000  # below lie control tokens and single bytes


class Arrivals(StrEnum):
    poisson = "poisson"
    even = "even"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    url: Annotated[str, typer.Option(help="Where the server listens.")] = "http://127.0.0.1:8000"
    model: Annotated[str | None, typer.Option(help="Its name there; left out, the first of /v1/models.")] = None
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY")] = None
    header: Annotated[list[str] | None, typer.Option(help="'name: value', sent with each request.")] = None
    trace: Annotated[Path | None, typer.Option(help="Mooncake .jsonl or Azure .csv, also with .gz.")] = None
    rate: Annotated[float, typer.Option(min=1e-6, help="Requests a second, without --trace.")] = 1.0
    duration: Annotated[float, typer.Option(min=0.1, help="Seconds of requests, without --trace.")] = 30.0
    arrivals: Annotated[Arrivals, typer.Option(help="Gaps between them, without --trace.")] = Arrivals.poisson
    concurrency: Annotated[int | None, typer.Option(min=1, help="Closed loop: so many at once.")] = None
    requests: Annotated[int | None, typer.Option(min=1, help="How many; a trace is repeated or cut.")] = None
    speed: Annotated[float, typer.Option(min=1e-6, help="Play the trace so many times as fast.")] = 1.0
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Mean, without --trace.")] = Lengths.prompt
    output_tokens: Annotated[int, typer.Option(min=1, help="Mean, without --trace.")] = Lengths.output
    sigma: Annotated[float, typer.Option(min=0.0, max=3.0, help="Spread of both; 0: all equal.")] = Lengths.sigma
    prompt_scale: Annotated[float, typer.Option(min=1e-6, help="Factor on a trace's prompts.")] = 1.0
    output_scale: Annotated[float, typer.Option(min=1e-6, help="Factor on a trace's outputs.")] = 1.0
    max_prompt: Annotated[int, typer.Option(min=1, help="Cut longer prompts.")] = 1 << 30
    max_output: Annotated[int, typer.Option(min=1, help="Cut longer outputs.")] = 1 << 30
    end_token: Annotated[int, typer.Option(min=FIRST_TOKEN + 1, help="Prompts use token ids below it.")] = 30_000
    ttft_ms: Annotated[float | None, typer.Option(min=0.001, help="Target for goodput.")] = None
    itl_ms: Annotated[float | None, typer.Option(min=0.001, help="Target for the mean time between tokens.")] = None
    timeout: Annotated[float, typer.Option(min=1.0, help="Give up after so many seconds without news.")] = 600.0
    json: Annotated[bool, typer.Option("--json", help="End with one JSON line; all else goes to stderr.")] = False
    plot: Annotated[Path | None, typer.Option(help="Draw to this file (.png, .svg, .pdf).")] = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.ttft_ms is None else self.ttft_ms / 1e3

    @property
    def itl_s(self) -> float | None:
        return None if self.itl_ms is None else self.itl_ms / 1e3

    @property
    def headers(self) -> dict[str, str]:
        pairs = [line.partition(":") for line in self.header or ()]
        for name, colon, _ in pairs:
            if not colon:
                raise typer.BadParameter(f"--header {name!r} must be 'name: value'")
        key = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return key | {name.strip(): value.strip() for name, _, value in pairs}


def bench(options: BenchOptions) -> None:
    """Send load to any OpenAI-compatible server; show latencies, throughput and goodput.

    Latencies count from the time at which a request should have been sent. Prompts are made-up token ids.
    """
    if options.plot is not None:
        check_plots()
    outcomes = asyncio.run(_run(options, make_jobs(options)))
    report = make_report(outcomes, options.ttft_s, options.itl_s)
    Console(stderr=options.json).print(as_table(report))
    if options.plot is not None:
        plot(outcomes, options.ttft_s, options.itl_s, options.plot)
    if options.json:
        setting = {key: value for key, value in asdict(options).items() if key not in ("api_key", "header")}
        typer.echo(as_json(report, setting).decode())


def make_jobs(options: BenchOptions) -> list[Job]:
    tokens = Tokens(FIRST_TOKEN, options.end_token)
    scale = Scale(
        speed=options.speed,
        prompt=options.prompt_scale,
        output=options.output_scale,
        max_prompt=options.max_prompt,
        max_output=options.max_output,
    )
    if options.trace is not None:
        return trace_jobs(options.trace, scale, tokens, options.requests)
    duration_s = options.duration if options.requests is None else 2 * options.requests / options.rate + 60
    times = arrival_times(options.rate, duration_s, is_poisson=options.arrivals is Arrivals.poisson)
    lengths = Lengths(prompt=options.prompt_tokens, output=options.output_tokens, sigma=options.sigma)
    return made_up_jobs(lengths, scale, tokens, times[: options.requests])


async def _run(options: BenchOptions, jobs: Sequence[Job]) -> list[Outcome]:
    headers = options.headers
    model = options.model or await find_model(options.url, headers)
    client = Client(options.url, model, headers, timeout_s=options.timeout)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("requests", total=len(jobs))
        fates = {"ok": 0, "refused": 0, "failed": 0}

        def on_end(outcome: Outcome) -> None:
            fates[outcome.fate] += 1
            description = ", ".join(f"{num} {fate}" for fate, num in fates.items() if num)
            progress.update(task, advance=1, description=description)

        try:
            if options.concurrency is not None:
                return await run_closed(client, jobs, on_end, options.concurrency)
            return await run_open(client, jobs, on_end)
        finally:
            await client.close()
