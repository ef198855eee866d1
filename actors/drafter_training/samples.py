# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""What a draft head learns from: a model's own answers, with the features that it had at each token.

A wave is a batch of prompts answered in lock-step by our own runner; each is one safetensors file, written whole or not
at all, so that collecting goes on where it was stopped.

    tokens        [num_tokens] int32, the samples one after another
    features      [num_tokens, 3 * hidden] bfloat16: outputs of the three tapped layers, low to high
    hidden        [num_tokens, hidden] bfloat16: what the final norm reads
    lengths       [num_samples] int32, prompt and answer
    prompt_lens   [num_samples] int32
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file, save_file

from baton.actors.engine.batch import Admission, Batch, Row
from baton.actors.engine.drafters.eagle import eagle3_taps
from baton.actors.engine.drafters.taps import Taps
from baton.actors.engine.kv_cache import KVSpec
from baton.actors.engine.models.llama import Llama
from baton.actors.engine.request import Request, SamplingParams
from baton.actors.engine.runner import TorchRunner
from baton.kernels.attention import AttentionBackend, AttentionShape
from baton.kernels.attention_torch import TorchAttention

_BLOCK_SIZE = 16
_PROMPTS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Sample:
    tokens: torch.Tensor  # [length] int64
    features: torch.Tensor  # [length, 3 * hidden]
    hidden: torch.Tensor  # [length, hidden]
    prompt_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    max_tokens: int
    temperature: float
    seed: int


class Collector:
    """Answers prompts and records features."""

    def __init__(
        self,
        model: Llama,
        *,
        wave_size: int,
        max_len: int,
        make_attention: Callable[[AttentionShape], AttentionBackend] = TorchAttention,
    ) -> None:
        self._eos_ids = model.config.eos_ids
        self._blocks_per_row = -(-max_len // _BLOCK_SIZE)
        spec = KVSpec.of_model(model.config, _BLOCK_SIZE, model.embeddings.dtype)
        layers = (*eagle3_taps(model.config.num_layers), model.config.num_layers - 1)
        self._taps = Taps(model, layers, max_tokens=max(wave_size, _PROMPTS_AT_ONCE * max_len))
        kv = spec.allocate(wave_size * self._blocks_per_row, model.embeddings.device)
        self._runner = TorchRunner(self._taps.model, kv, num_slots=wave_size, make_attention=make_attention)

    @torch.inference_mode()
    def collect(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Sample]:
        """Answer every prompt; `sampling.seed` and a prompt's place in the wave decide its random numbers."""
        answers = [_Answer(list(prompt), len(prompt)) for prompt in prompts]
        admissions = [_admission(i, answer.tokens, sampling) for i, answer in enumerate(answers)]
        running = list(range(len(answers)))
        # Prompts a few at a time, since attention holds all scores of a step; then all rows, one token each.
        for start in range(0, len(running), _PROMPTS_AT_ONCE):
            group = running[start : start + _PROMPTS_AT_ONCE]
            self._step(answers, group, admissions[start : start + _PROMPTS_AT_ONCE])
        while running := [i for i in running if not answers[i].has_ended(self._eos_ids, sampling.max_tokens)]:
            self._step(answers, running)
        return [answer.sample() for answer in answers]

    def _step(self, answers: list[_Answer], group: list[int], admissions: Sequence[Admission] = ()) -> None:
        """Compute what each of `group` has not computed, and sample its next token."""
        rows = tuple(self._row(i, answers[i]) for i in group)
        output = self._runner.launch(Batch(rows, tuple(admissions))).wait()
        features = self._taps.features(sum(row.num_tokens for row in rows)).to(torch.bfloat16, copy=True)
        parts = _split(features, [row.num_tokens for row in rows])
        for i, part, tokens in zip(group, parts, output.tokens, strict=True):
            answers[i].features.append(part)
            answers[i].num_computed = len(answers[i].tokens)
            answers[i].tokens += tokens

    def _row(self, index: int, answer: _Answer) -> Row:
        first = index * self._blocks_per_row
        blocks, tokens = range(first, first + self._blocks_per_row), answer.tokens[answer.num_computed :]
        return Row(index, answer.num_computed, len(tokens), tokens, blocks, True)


@dataclass(slots=True)
class _Answer:
    tokens: list[int]
    prompt_len: int
    features: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    num_computed: int = 0

    def has_ended(self, eos_ids: tuple[int, ...], max_tokens: int) -> bool:
        return self.tokens[-1] in eos_ids or len(self.tokens) - self.prompt_len > max_tokens

    def sample(self) -> Sample:
        """All but the last token, whose features were never computed."""
        features = torch.cat(self.features)  # [length, 4, hidden]
        tokens = torch.tensor(self.tokens[:-1])
        return Sample(tokens, features[:, :-1].flatten(1), features[:, -1], prompt_len=self.prompt_len)


def _admission(slot: int, tokens: list[int], sampling: Sampling) -> Admission:
    params = SamplingParams(max_tokens=sampling.max_tokens, seed=sampling.seed + slot, temperature=sampling.temperature)
    request = Request(id=str(slot), tokens=tuple(tokens), sampling=params)
    return Admission(slot, request, request.tokens)


def save_wave(samples: Sequence[Sample], path: Path) -> None:
    tensors = {
        "tokens": torch.cat([sample.tokens for sample in samples]).int(),
        "features": torch.cat([sample.features for sample in samples]),
        "hidden": torch.cat([sample.hidden for sample in samples]),
        "lengths": torch.tensor([len(sample.tokens) for sample in samples], dtype=torch.int32),
        "prompt_lens": torch.tensor([sample.prompt_len for sample in samples], dtype=torch.int32),
    }
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    os.replace(partial, path)


def load_wave(path: Path) -> list[Sample]:
    tensors = load_file(path)
    lengths: list[int] = tensors["lengths"].tolist()
    prompt_lens: list[int] = tensors["prompt_lens"].tolist()
    tokens, features, hidden = (_split(tensors[name], lengths) for name in ("tokens", "features", "hidden"))
    return [Sample(tokens[i].long(), features[i], hidden[i], prompt_len) for i, prompt_len in enumerate(prompt_lens)]


def _split(x: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    return list(cast("tuple[torch.Tensor, ...]", x.split(lengths)))


def collect_waves(
    collector: Callable[[], Collector],
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    folder: Path,
    wave_size: int,
) -> Iterator[tuple[int, int]]:
    """Write every wave that `folder` lacks; yields (waves done, of all) after each, so that a caller may stop."""
    folder.mkdir(parents=True, exist_ok=True)
    starts = range(0, len(prompts), wave_size)
    made: Collector | None = None
    for wave, start in enumerate(starts):
        path = folder / f"wave-{wave:04d}.safetensors"
        if not path.exists():
            made = made or collector()
            seeded = Sampling(
                max_tokens=sampling.max_tokens, temperature=sampling.temperature, seed=sampling.seed + start
            )
            save_wave(made.collect(prompts[start : start + wave_size], seeded), path)
        yield wave + 1, len(starts)


def load_waves(folder: Path) -> list[Sample]:
    return [sample for path in sorted(folder.glob("wave-*.safetensors")) for sample in load_wave(path)]
