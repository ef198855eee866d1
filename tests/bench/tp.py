"""Tensor parallelism on the GPUs of this machine: is what two ranks say what one says, and is a decode step faster?

First a small random model: in float32 tokens must be equal; in bfloat16 more ranks may be off by twice what one is.
Then decode steps of the Llama-3.1-8B shape (random weights, 1k of context) for each number of ranks.

    python tests/bench/tp.py --json out.json             # --worlds 1,2,4 with four GPUs; --device cpu: the check alone
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from baton.actors.build import BuiltEngine, build_engine
from baton.actors.config import WorkerConfig
from baton.actors.engine.config import EngineConfig
from baton.actors.engine.request import Request, SamplingParams

LLAMA_8B = Path(__file__).parent / "models" / "llama-3.1-8b"
SMALL = LlamaConfig(
    vocab_size=4099,  # no multiple of anything: the last rank has fewer outputs of the head
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=2048,
    initializer_range=0.1,
)
PROMPT_LENS = (1, 5, 16, 33, 250, 700)
NUM_TOKENS = 48
FLOAT32_LIMIT = 1e-3  # see `limit`
CONTEXT = 1024


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list[int])
    chosen: list[float] = field(default_factory=list[float])  # log-probabilities
    gaps: list[float] = field(default_factory=list[float])  # between the two best


@dataclass(frozen=True)
class Difference:
    dtype: str
    world: int
    num_tokens: int
    num_equal: int  # up to each request's first other token
    num_parted: int  # requests that have one
    worst_logprob: float  # difference among the equal tokens
    widest_gap: float  # between the reference's two best where a request parted


@dataclass(frozen=True)
class Timing:
    world: int
    batch: int
    median_ms: float
    p99_ms: float


@contextmanager
def engine_of(config: WorkerConfig) -> Iterator[BuiltEngine]:
    built = build_engine(config)
    try:
        yield built
    finally:
        built.ranks.close()
        del built
        gc.collect()
        torch.cuda.empty_cache()


def answers(path: Path, dtype: str, world: int, device: str) -> dict[str, Answer]:
    config = WorkerConfig.model_validate(
        {
            "model": str(path),
            "served_name": "small",
            "device": device,
            "dtype": dtype,
            "tensor_parallel": world,
            "engine": {"num_blocks": 512, "max_num_seqs": 8, "max_step_tokens": 256, "max_prefill_chunk": 200},
        }
    )
    sampling = SamplingParams(max_tokens=NUM_TOKENS, seed=0, temperature=0.0, ignore_eos=True, logprobs=2)
    found: dict[str, Answer] = {}
    with engine_of(config) as built:
        for length in PROMPT_LENS:
            tokens = tuple((17 * length + 31 * i * i) % SMALL.vocab_size for i in range(length))
            built.engine.submit(Request(id=str(length), tokens=tokens, sampling=sampling))
            found[str(length)] = Answer()
        while built.engine.has_work:
            for update in built.engine.step():
                answer = found[update.request_id]
                answer.tokens += update.tokens
                for entry in update.logprobs or ():
                    answer.chosen.append(entry.chosen)
                    answer.gaps.append(entry.top[0] - entry.top[1])
    return found


def compare(found: dict[str, Answer], reference: dict[str, Answer], dtype: str, world: int) -> Difference:
    """Compare the tokens of each request up to where it parts from the reference."""
    num_equal = num_parted = 0
    worst = widest_gap = 0.0
    for id, expected in reference.items():
        pairs = zip(found[id].tokens, expected.tokens, strict=True)
        num_same = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), NUM_TOKENS)
        num_equal += num_same
        for ours, theirs in zip(found[id].chosen[:num_same], expected.chosen[:num_same], strict=True):
            worst = max(worst, abs(ours - theirs))
        if num_same < NUM_TOKENS:
            num_parted += 1
            widest_gap = max(widest_gap, expected.gaps[num_same])
    return Difference(dtype, world, NUM_TOKENS * len(reference), num_equal, num_parted, worst, widest_gap)


def differences(worlds: list[int], device: str) -> list[Difference]:
    """Compare everything with one rank in float32."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(SMALL).save_pretrained(folder)
        reference = answers(Path(folder), "float32", 1, device)
        runs = [("float32", world) for world in worlds if world > 1] + [("bfloat16", world) for world in {1, *worlds}]
        return [compare(answers(Path(folder), *run, device), reference, *run) for run in runs]


def limit(found: list[Difference], dtype: str) -> float:
    """How far a log-probability may be off. In bfloat16, twice as far as rounding alone takes one rank."""
    if dtype == "float32":
        return FLOAT32_LIMIT
    return 2 * next(d.worst_logprob for d in found if d.dtype == dtype and d.world == 1)


def is_right(difference: Difference, limit: float) -> bool:
    """Tokens may part only where the reference's two best were so close that both being off explains it."""
    return difference.worst_logprob <= limit and difference.widest_gap <= 2 * limit


def timings(world: int, batches: list[int], num_steps: int = 64) -> list[Timing]:
    engine = EngineConfig(
        max_num_seqs=max(batches),
        max_step_tokens=8192,
        max_prefill_chunk=8192,
        prefix_cache=False,
        num_blocks=max(batches) * (CONTEXT // 16 + 16) + 64,
        max_context=2 * CONTEXT,
    )
    config = WorkerConfig(
        model=str(LLAMA_8B),
        served_name="bench",
        load_format="dummy",
        device="cuda",
        tensor_parallel=world,
        engine=engine,
    )
    with engine_of(config) as built:
        return [_time_decode(built, world, batch, num_steps) for batch in batches]


def _time_decode(built: BuiltEngine, world: int, batch: int, num_steps: int) -> Timing:
    engine = built.engine
    sampling = SamplingParams(max_tokens=num_steps + 40, seed=0, temperature=0.0, ignore_eos=True)
    for i in range(batch):
        tokens = tuple((i + 31 * j * j) % 100_000 for j in range(CONTEXT - num_steps // 2))
        engine.submit(Request(id=f"{batch}/{i}", tokens=tokens, sampling=sampling))
    while engine.waiting_tokens:
        engine.step()
    for _ in range(8):
        engine.step()
    steps: list[float] = []
    for _ in range(num_steps):
        started = time.perf_counter()
        engine.step()
        steps.append((time.perf_counter() - started) * 1e3)
    while engine.has_work:
        engine.step()
    return Timing(world, batch, statistics.median(steps), sorted(steps)[int(0.99 * num_steps)])


def show(console: Console, found: list[Difference], times: list[Timing]) -> None:
    columns = (
        "dtype",
        "ranks",
        "tokens equal",
        "requests parted",
        "gap there",
        "log-prob off by",
        "allowed",
        "verdict",
    )
    table = Table(*columns, title="against one rank in float32")
    for d in found:
        allowed = limit(found, d.dtype)
        verdict = "[green]right[/green]" if is_right(d, allowed) else "[red]WRONG[/red]"
        figures = (f"{d.widest_gap:.1e}", f"{d.worst_logprob:.1e}", f"{allowed:.1e}")
        table.add_row(d.dtype, str(d.world), f"{d.num_equal}/{d.num_tokens}", str(d.num_parted), *figures, verdict)
    console.print(table)
    if not times:
        return
    single = {t.batch: t.median_ms for t in times if t.world == 1}
    title = f"decode step, Llama-3.1-8B shape, {CONTEXT} of context, {torch.cuda.get_device_name()}"
    table = Table("batch", "ranks", "median ms", "p99 ms", "speed-up", title=title)
    for t in sorted(times, key=lambda t: (t.batch, t.world)):
        speed_up = f"{single[t.batch] / t.median_ms:.2f}x" if t.batch in single else ""
        table.add_row(str(t.batch), str(t.world), f"{t.median_ms:.2f}", f"{t.p99_ms:.2f}", speed_up)
    console.print(table)


def main(
    worlds: Annotated[str, typer.Option(help="numbers of ranks")] = "1,2",
    batches: Annotated[str, typer.Option(help="sequences that decode at once")] = "1,8,64",
    device: Annotated[str, typer.Option(help="cuda, or cpu for the check alone")] = "cuda",
    json_path: Annotated[Path | None, typer.Option("--json", help="write the figures here too")] = None,
) -> None:
    console = Console(width=120)
    wanted = [int(world) for world in worlds.split(",")]
    possible = [world for world in wanted if device == "cpu" or world <= torch.cuda.device_count()]
    if possible != wanted:
        console.print(f"[yellow]{torch.cuda.device_count()} GPUs here: only {possible} of {wanted} ranks run[/yellow]")
    found = differences(possible, device)
    sizes = [int(batch) for batch in batches.split(",")]
    times = [] if device == "cpu" else [timing for world in possible for timing in timings(world, sizes)]
    show(console, found, times)
    if json_path is not None:
        figures = {"differences": [asdict(d) for d in found], "timings": [asdict(t) for t in times]}
        json_path.write_text(json.dumps(figures))
    if not all(is_right(d, limit(found, d.dtype)) for d in found):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
