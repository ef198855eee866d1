"""What a draft head learns from: a model's own answers, with the features that it had at each token.

A wave is a batch of prompts answered in lock-step by our own runner; each is one safetensors file, written whole or not
at all, so that collecting goes on where it was stopped.

    tokens        [num_tokens] int32, the samples one after another
    features      [num_tokens, 3 * hidden] bfloat16: inputs of the three tapped layers, low to high
    hidden        [num_tokens, hidden] bfloat16: what the final norm reads
    lengths       [num_samples] int32, prompt and answer
    prompt_lens   [num_samples] int32
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from baton.actors.engine.batch import Admission, Batch, Row
from baton.actors.engine.kv_cache import KVSpec
from baton.actors.engine.models.llama import LayerCache, Llama
from baton.actors.engine.models.model import StepInputs
from baton.actors.engine.models.tap import Keep, eagle3_taps, tap_layers
from baton.actors.engine.request import Request, SamplingParams
from baton.actors.engine.runner import TorchRunner
from baton.kernels.attention import AttentionBackend
from baton.kernels.attention_torch import TorchAttention

_BLOCK_SIZE = 16


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
    """Answers prompts and records features. The model is tapped for good: nothing else should use it meanwhile."""

    def __init__(self, model: Llama, *, wave_size: int, max_len: int) -> None:
        hidden = model.config.hidden_size
        self._model = model
        self._blocks_per_row = -(-max_len // _BLOCK_SIZE)
        kv = KVSpec.of_model(model.config, _BLOCK_SIZE, model.embeddings.dtype).allocate(
            wave_size * self._blocks_per_row
        )
        # By cache slot, like the KV itself.
        self._features = torch.zeros(kv.shape[0] * _BLOCK_SIZE, 3 * hidden, dtype=torch.bfloat16)
        self._hidden = torch.zeros(kv.shape[0] * _BLOCK_SIZE, hidden, dtype=torch.bfloat16)
        taps = eagle3_taps(model.config.num_layers)
        tap_layers(model, {layer: self._keep(i) for i, layer in enumerate(taps)})
        self._runner = TorchRunner(
            _LastHidden(model, self._hidden), kv, num_slots=wave_size, make_attention=TorchAttention
        )

    @torch.inference_mode()
    def collect(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Sample]:
        """Answer every prompt; `sampling.seed` and a prompt's place in the wave decide its random numbers."""
        requests = [
            Request(
                id=str(i),
                tokens=tuple(prompt),
                sampling=SamplingParams(
                    max_tokens=sampling.max_tokens, seed=sampling.seed + i, temperature=sampling.temperature
                ),
            )
            for i, prompt in enumerate(prompts)
        ]
        texts = [list(prompt) for prompt in prompts]
        running = list(range(len(texts)))
        computed = [0] * len(texts)
        admissions = tuple(Admission(i, request, request.tokens) for i, request in enumerate(requests))
        while running:
            for group in self._steps(running, texts, computed):
                rows = tuple(self._row(i, computed[i], texts[i]) for i in group)
                batch = Batch(rows, tuple(a for a in admissions if a.slot in group and computed[a.slot] == 0))
                for i, (token,) in zip(group, self._runner.launch(batch).wait().tokens, strict=True):
                    computed[i] = len(texts[i])
                    texts[i].append(token)
            ended = {i for i in running if self._is_over(texts[i], len(prompts[i]), sampling.max_tokens)}
            running = [i for i in running if i not in ended]
        # The last sampled token's own features were never computed.
        return [self._sample(i, texts[i][:-1], len(prompt)) for i, prompt in enumerate(prompts)]

    def _steps(self, running: list[int], texts: list[list[int]], computed: list[int]) -> Iterator[list[int]]:
        """Prompts a few at a time, since attention holds all scores of a step; then all rows, one token each."""
        if computed[running[0]]:
            yield running
        else:
            yield from (running[i : i + 8] for i in range(0, len(running), 8))

    def _row(self, index: int, start: int, tokens: list[int]) -> Row:
        first = index * self._blocks_per_row
        blocks = range(first, first + self._blocks_per_row)
        return Row(index, start, len(tokens) - start, tokens[start:], blocks, True)

    def _is_over(self, tokens: list[int], prompt_len: int, max_tokens: int) -> bool:
        return tokens[-1] in self._model.config.eos_ids or len(tokens) - prompt_len > max_tokens

    def _sample(self, index: int, tokens: list[int], prompt_len: int) -> Sample:
        first = index * self._blocks_per_row * _BLOCK_SIZE
        places = slice(first, first + len(tokens))
        return Sample(
            torch.tensor(tokens), self._features[places].clone(), self._hidden[places].clone(), prompt_len=prompt_len
        )

    def _keep(self, part: int) -> Keep:
        hidden = self._model.config.hidden_size
        columns = self._features[:, part * hidden : (part + 1) * hidden]

        def keep(h: torch.Tensor, cache: LayerCache) -> None:
            columns[cache.places.slots] = h.to(torch.bfloat16)

        return keep


class _LastHidden:
    """A model that also writes its last hidden states to `store` [num_cache_slots, hidden]."""

    def __init__(self, model: Llama, store: torch.Tensor) -> None:
        self._model = model
        self._store = store
        self.config = model.config
        self.shapes = model.shapes
        self.logits = model.logits
        self.normed = model.normed

    def forward(self, inputs: StepInputs, kv: torch.Tensor, attention: Sequence[AttentionBackend]) -> torch.Tensor:
        hidden = self._model.forward(inputs, kv, attention)
        self._store[inputs.places.slots] = hidden.to(torch.bfloat16)
        return hidden


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
    lengths = tensors["lengths"].tolist()
    parts = [tensors[name].split(lengths) for name in ("tokens", "features", "hidden")]
    prompt_lens = tensors["prompt_lens"].tolist()
    return [Sample(t.long(), f, h, p) for t, f, h, p in zip(*parts, prompt_lens, strict=True)]


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
