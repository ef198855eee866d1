"""Engine benchmark on one GPU: decode steps, prefill, throughput and mixed load, each beside the card's own limits.

No HTTP, no Ray: an Engine and its runner in this process. Random weights. Every ratio is taken within one run.

    python tests/bench/engine.py --json out.json
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from baton.actors.build import BuiltEngine, build_engine
from baton.actors.config import WorkerConfig
from baton.actors.engine.batch import Batch, PendingStep, Runner, StepOutput
from baton.actors.engine.config import EngineConfig
from baton.actors.engine.engine import Engine
from baton.actors.engine.request import Request, SamplingParams

LLAMA_8B = Path(__file__).parent / "models" / "llama-3.1-8b"
# Same card, same work, measured elsewhere: see DESIGN.md section 2.
BUDGETS = (256, 384, 512, 1024, 2048, 8192)  # prompt tokens a step, for the mixed load
SGLANG = {"decode 1": 4.75, "decode 8": 5.12, "decode 64": 7.67, "decode 256": 18.55, "prefill 8k": 218.0}
VLLM = {"decode 1": 4.93, "decode 8": 5.26, "decode 64": 7.92, "decode 256": 18.95, "prefill 8k": 212.0}


@dataclass(frozen=True)
class Ceilings:
    copy_bytes_per_s: float  # read plus written
    flops: float  # bf16


@dataclass
class Result:
    name: str
    unit: str
    measured: float
    floor: float | None = None
    sglang: float | None = None
    vllm: float | None = None
    host_ms: float | None = None
    idle_share: float | None = None


class _TimedStep:
    def __init__(self, step: PendingStep, waits: list[float]) -> None:
        self._step, self._waits = step, waits

    def wait(self) -> StepOutput:
        started = time.perf_counter()
        output = self._step.wait()
        self._waits.append(time.perf_counter() - started)
        return output


class TimedRunner:
    """Notes how long the host waits for the device, so that the rest of a step is the host's own time."""

    def __init__(self, runner: Runner) -> None:
        self.inner = runner
        self.waits: list[float] = []

    def launch(self, batch: Batch) -> PendingStep:
        return _TimedStep(self.inner.launch(batch), self.waits)


class Bench:
    def __init__(self, built: BuiltEngine, num_params: int, console: Console) -> None:
        self.built = built
        self.engine = built.engine
        self.runner = TimedRunner(self.engine._runner)  # pyright: ignore[reportPrivateUsage]
        self.engine._runner = self.runner  # pyright: ignore[reportPrivateUsage]
        self.kv_bytes_per_token = built.kv.nbytes // built.num_blocks // built.layout.block_size
        self.num_params = num_params
        self.vocab = 100_000
        self.console = console
        self._num = 0
        self._random = random.Random(0)

    def submit(self, prompt_len: int, max_tokens: int) -> str:
        self._num += 1
        tokens = tuple(self._random.randrange(self.vocab) for _ in range(prompt_len))
        sampling = SamplingParams(max_tokens=max_tokens, seed=self._num, ignore_eos=True, temperature=0.0)
        self.engine.submit(Request(id=str(self._num), tokens=tokens, sampling=sampling))
        return str(self._num)

    def drain(self) -> int:
        num_tokens = 0
        while self.engine.has_work:
            num_tokens += sum(len(update.tokens) for update in self.engine.step())
        return num_tokens

    def decode(self, batch: int, ceilings: Ceilings, num_steps: int = 60) -> Result:
        for _ in range(batch):
            self.submit(1024 - num_steps // 2, num_steps + 24)
        num_first = 0
        while num_first < batch:
            num_first += sum(1 for update in self.engine.step() if update.tokens and update.num_computed <= 1024)
        for _ in range(8):
            self.engine.step()
        self.runner.waits.clear()
        steps: list[float] = []
        for _ in range(num_steps - 12):
            started = time.perf_counter()
            self.engine.step()
            steps.append(time.perf_counter() - started)
        host = [step - wait for step, wait in zip(steps, self.runner.waits, strict=True)]
        self.drain()
        kv = batch * 1024 * self.kv_bytes_per_token
        name = f"decode {batch}"
        return Result(
            name,
            "ms",
            statistics.median(steps) * 1e3,
            floor=(2 * self.num_params + kv) / ceilings.copy_bytes_per_s * 1e3,
            sglang=SGLANG.get(name),
            vllm=VLLM.get(name),
            host_ms=statistics.median(host) * 1e3,
        )

    def idle_share(self, batch: int, num_steps: int = 30) -> float:
        """Share of wall time in which no kernel runs, over decode steps, from the profiler's device timeline."""
        for _ in range(batch):
            self.submit(512, num_steps + 40)
        while self.engine.waiting_tokens:
            self.engine.step()
        for _ in range(8):
            self.engine.step()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(num_steps):
                self.engine.step()
            torch.cuda.synchronize()
        self.drain()
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        )
        busy, end = 0.0, spans[0][0]
        for start, stop in spans:
            busy += max(0.0, stop - max(start, end))
            end = max(end, stop)
        return 1 - busy / (end - spans[0][0])

    def profile_decode(self, batch: int, num_steps: int = 20) -> None:
        """Show where a decode step's device time goes."""
        for _ in range(batch):
            self.submit(1024, num_steps + 60)
        while self.engine.waiting_tokens:
            self.engine.step()
        for _ in range(8):
            self.engine.step()
        self._profile(f"decode {batch}", num_steps, self.engine.step)
        self.drain()

    def profile_prefill(self, length: int) -> None:
        def work() -> None:
            self.submit(length, 1)
            self.drain()

        work()
        self._profile(f"prefill {length}", 1, work)

    def _profile(self, name: str, num: int, work: Callable[[], object]) -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(num):
                work()
            torch.cuda.synchronize()
        table = Table("kernel", "calls", "us each", "ms a step", title=name)
        events = sorted(profile.key_averages(), key=lambda event: -event.device_time_total)
        for event in events[:14]:
            each = event.device_time_total / event.count
            total = event.device_time_total / num / 1e3
            table.add_row(event.key[:90], f"{event.count / num:.1f}", f"{each:.1f}", f"{total:.3f}")
        self.console.print(table)

    def prefill(self, length: int, ceilings: Ceilings, repeats: int = 5) -> Result:
        times: list[float] = []
        for _ in range(repeats + 1):
            self.submit(length, 1)
            torch.cuda.synchronize()
            started = time.perf_counter()
            self.drain()
            times.append(time.perf_counter() - started)
        flops = 2 * self.num_params * length
        name = f"prefill {length // 1024}k"
        return Result(
            name,
            "ms",
            statistics.median(times[1:]) * 1e3,
            floor=flops / ceilings.flops * 1e3,
            sglang=SGLANG.get(name),
            vllm=VLLM.get(name),
        )

    def throughput(self, num_requests: int = 256) -> Result:
        rng = random.Random(1)
        total = 0
        for _ in range(num_requests):
            num_out = rng.randint(100, 1024)
            total += num_out
            self.submit(rng.randint(100, 1024), num_out)
        torch.cuda.synchronize()
        started = time.perf_counter()
        num_tokens = self.drain()
        assert num_tokens == total, (num_tokens, total)
        return Result(
            "256 requests", "tokens/s", num_tokens / (time.perf_counter() - started), sglang=9949.0, vllm=9745.0
        )

    def with_budget(self, step_tokens: int) -> Bench:
        """The same runner under an engine with another token budget per step."""
        config = EngineConfig(
            max_num_seqs=256, max_step_tokens=max(256, step_tokens), max_prefill_chunk=step_tokens, prefix_cache=False
        )
        engine = Engine(
            config, self.runner.inner, num_blocks=self.built.num_blocks, max_context=self.built.max_context,
            eos_token_ids=frozenset(),
        )  # fmt: skip
        return Bench(replace(self.built, engine=engine), self.num_params, self.console)

    def mixed(self, batch: int = 64, seconds: float = 5.0) -> dict[str, float]:
        """Decode `batch` sequences while 8k prompts arrive, one a second: gaps between their tokens, prefill's rate."""
        decoding = [self.submit(1024, 4000) for _ in range(batch)]
        while self.engine.waiting_tokens:
            self.engine.step()
        quiet = [self._timed_step() for _ in range(60)][10:]
        gaps: list[float] = []
        host: list[float] = []
        under_way: dict[str, float] = {}
        prompt_s: list[float] = []
        begun = time.perf_counter()
        while (now := time.perf_counter()) - begun < seconds or under_way:
            if len(under_way) + len(prompt_s) <= now - begun < seconds:
                under_way[self.submit(8192, 1)] = now
            was_busy = bool(under_way)
            self.runner.waits.clear()
            updates = self.engine.step()
            if was_busy:
                gaps.append(time.perf_counter() - now)
                host.append(gaps[-1] - sum(self.runner.waits))
            for update in updates:
                if update.finish and update.request_id in under_way:
                    prompt_s.append(time.perf_counter() - under_way.pop(update.request_id))
        for request_id in decoding:
            self.engine.cancel(request_id)
        self.drain()
        gaps.sort()
        return {
            "quiet_itl_ms": statistics.median(quiet) * 1e3,
            "itl_ms": statistics.median(gaps) * 1e3,
            "p99_itl_ms": gaps[int(len(gaps) * 0.99)] * 1e3,
            "host_ms": statistics.median(host) * 1e3,
            "prompt_tokens_per_s": 8192 / statistics.median(prompt_s),
        }

    def _timed_step(self) -> float:
        started = time.perf_counter()
        self.engine.step()
        return time.perf_counter() - started


def measure_ceilings() -> Ceilings:
    """Measure what the card itself can do: a large copy, a large bf16 matrix product on random data."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy_s = _timed(partial(target.copy_, source))
    del source, target
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    product_s = _timed(partial(torch.matmul, a, a))
    return Ceilings(2 * (4 << 30) / copy_s, 2 * 8192**3 / product_s)


def _timed(work: Callable[[], object], repeats: int = 10) -> float:
    for _ in range(3):
        work()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats / 1e3


def build(*, max_step_tokens: int, kv_dtype: str = "auto") -> BuiltEngine:
    engine = EngineConfig(
        max_num_seqs=256, max_step_tokens=max_step_tokens, max_prefill_chunk=8192, prefix_cache=False, num_blocks=40_000
    )
    return build_engine(
        WorkerConfig(model=str(LLAMA_8B), served_name="bench", load_format="dummy", device="cuda", engine=engine)
    )


def show(console: Console, results: list[Result]) -> None:
    table = Table(title=f"{torch.cuda.get_device_name()}, Llama-3.1-8B shape, bf16, random weights")
    columns = ("work", "measured", "floor", "ratio", "SGLang 0.5.14", "vLLM 0.25.0", "host ms", "idle")
    for column in columns:
        table.add_column(column, justify="left" if column == "work" else "right")
    for r in results:
        table.add_row(
            r.name,
            f"{r.measured:.2f} {r.unit}",
            _number(r.floor),
            _number(r.measured / r.floor if r.floor else None),
            _number(r.sglang),
            _number(r.vllm),
            _number(r.host_ms),
            _number(None if r.idle_share is None else 100 * r.idle_share),
        )
    console.print(table)


def show_mixed(console: Console, mixed: dict[int, dict[str, float]]) -> None:
    table = Table(title="64 decoding, an 8k prompt every second", caption="by tokens that a step may spend on prompts")
    columns = ("tokens a step", "ITL without prompts, ms", "ITL, ms", "p99", "p99 ratio", "host ms", "prompt tokens/s")
    for column in columns:
        table.add_column(column, justify="right")
    for size, row in mixed.items():
        ratio = row["p99_itl_ms"] / row["quiet_itl_ms"]
        table.add_row(
            str(size),
            f"{row['quiet_itl_ms']:.2f}",
            f"{row['itl_ms']:.2f}",
            f"{row['p99_itl_ms']:.2f}",
            f"{ratio:.2f}",
            f"{row['host_ms']:.2f}",
            f"{row['prompt_tokens_per_s']:.0f}",
        )
    console.print(table)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="write the figures here too")] = None,
    only: Annotated[str, typer.Option(help="comma-separated parts: decode,prefill,throughput,mixed,idle,profile")] = (
        "decode,prefill,throughput,mixed,idle"
    ),
) -> None:
    console = Console(width=150)
    parts = only.split(",")
    ceilings = measure_ceilings()
    console.print(f"copy {ceilings.copy_bytes_per_s / 1e12:.2f} TB/s, bf16 product {ceilings.flops / 1e12:.0f} TFLOP/s")
    built = build(max_step_tokens=8192)
    num_params = 8_030_261_248 - 128256 * 4096  # the input embedding is not read
    bench = Bench(built, num_params, console)
    results: list[Result] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=8)
        if "decode" in parts:
            for batch in (1, 8, 64, 256):
                results.append(bench.decode(batch, ceilings))
                progress.advance(task)
        if "idle" in parts:
            results.append(Result("idle at 64", "%", 100 * bench.idle_share(64)))
        if "prefill" in parts:
            results.append(bench.prefill(8192, ceilings))
            progress.advance(task)
        if "throughput" in parts:
            results.append(bench.throughput())
            progress.advance(task)
        mixed = {size: bench.with_budget(size).mixed() for size in BUDGETS} if "mixed" in parts else {}
    if "profile" in parts:
        for batch in (1, 8, 64, 256):
            bench.profile_decode(batch)
        bench.profile_prefill(8192)
    show(console, results)
    if mixed:
        show_mixed(console, mixed)
    if json_path is not None:
        figures = {"ceilings": asdict(ceilings), "results": [asdict(r) for r in results], "mixed": mixed}
        json_path.write_text(json.dumps(figures))


if __name__ == "__main__":
    typer.run(main)
