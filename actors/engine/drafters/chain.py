"""Drafting by a small network on the target's features: what EAGLE and MTP have in common.

    position        i             i + 1          ...
    reads           features[i]   features[i+1]        the target's, where it has been; behind, the network's own output
                    token i + 1   token i + 2          embedded
    foresees        token i + 2   token i + 3

Its KV lies in the block behind the target's layers, at the same places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from baton.actors.engine.batch import Row
from baton.actors.engine.drafters.context import ModuleContext
from baton.actors.engine.drafters.module import TargetStep, draft_pass
from baton.actors.engine.loader_safetensors import read_hf_config
from baton.actors.engine.model_config import HFConfig, ModelConfig, UnsupportedModelError
from baton.actors.engine.models.llama import LayerCache, Llama
from baton.actors.engine.rope import cos_sin_table
from baton.actors.engine.step_fields import step_layout
from baton.actors.engine.weights import Weights
from baton.kernels.attention import AttentionBackend, AttentionShape
from baton.kernels.linear import Linear
from baton.kernels.rope_store import TokenPlaces


@dataclass(frozen=True, slots=True)
class ChainPlaces:
    """What the layers of one forward pass need beside their input."""

    kv: torch.Tensor  # the whole cache
    places: TokenPlaces
    backend: AttentionBackend

    def cache(self, layer: int) -> LayerCache:
        """`layer` counts from the last: -1 is the last of the block."""
        return LayerCache(self.kv[:, layer], self.places, self.backend)


class ChainNetwork(Protocol):
    """`h` and what `run` returns: [num_tokens, hidden]."""

    num_layers: int
    taps: tuple[int, ...]
    shape: AttentionShape

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """From the target's features [num_tokens, len(taps), hidden] to the first pass's input."""
        ...

    def run(self, h: torch.Tensor, tokens: torch.Tensor, at: ChainPlaces) -> torch.Tensor:
        """Read `h`, whose memory it may take, and the tokens after it; the result is the next pass's input."""
        ...

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """Over the target's whole vocabulary; -inf where nothing can be drafted."""
        ...


class ChainDrafter:
    """A DraftModule that drafts one token after another."""

    needs_every_step = False

    def __init__(self, network: ChainNetwork, context: ModuleContext) -> None:
        shapes = context.target.shapes
        self._network = network
        # Of the target's backends, which are planned for the step; None = it has none of the network's kind.
        self._shared = shapes.index(network.shape) if network.shape in shapes else None
        self._own_attention = context.make_attention(network.shape)
        self._block_size = context.block_size

    @property
    def num_layers(self) -> int:
        return self._network.num_layers

    @property
    def taps(self) -> tuple[int, ...]:
        return self._network.taps

    def advance(self, step: TargetStep) -> torch.Tensor:
        backend = self._plan(step.rows) if self._shared is None else step.attention[self._shared]
        at = ChainPlaces(step.kv, step.places, backend)
        h = self._network.run(self._network.fuse(step.features), step.following, at)
        last = torch.tensor(step.last, dtype=torch.int64, device=h.device)
        if not (step.num_drafts and step.last):
            return last.new_empty(len(step.last), step.num_drafts)
        h = h.index_select(0, last)
        drafts = [step.choose(self._network.logits(h), 0)]
        for index in range(1, step.num_drafts):
            h = self._network.run(h, drafts[-1], self._places_of_draft(step, index - 1))
            drafts.append(step.choose(self._network.logits(h), index))
        return torch.stack(drafts, dim=1)

    def _places_of_draft(self, step: TargetStep, index: int) -> ChainPlaces:
        place = draft_pass(step, index, self._block_size)
        backend = self._plan(place.rows)
        device = step.places.positions.device
        positions, slots = (torch.tensor(values, device=device) for values in (place.positions, place.slots))
        return ChainPlaces(step.kv, TokenPlaces(positions, slots), backend)

    def _plan(self, rows: Sequence[Row]) -> AttentionBackend:
        self._own_attention.plan(step_layout(rows, self._block_size))
        return self._own_attention


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """A head over the most frequent tokens only (FR-Spec): its row i stands for the target's token `target_ids[i]`."""

    head: Linear
    target_ids: torch.Tensor  # [draft_vocab] int64
    vocab_size: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.head(x)
        full = logits.new_full((x.shape[0], self.vocab_size), float("-inf"))
        return full.index_copy_(1, self.target_ids, logits)


def read_target_ids(weights: Weights, size: int, vocab_size: int) -> torch.Tensor:
    """From `d2t`, which holds what to add to each draft id. Raises UnsupportedModelError where a sum is no token."""
    offsets = weights.tensor("d2t", size, dtype=torch.int64)
    target_ids = offsets + torch.arange(size, device=offsets.device)
    if size and not 0 <= int(target_ids.min()) <= int(target_ids.max()) < vocab_size:
        raise UnsupportedModelError(f"d2t maps outside the target's vocabulary of {vocab_size}: not a head for it")
    return target_ids


def head_rows(model: Llama, ids: torch.Tensor) -> torch.Tensor:
    """The rows of the model's own head for these tokens: [num_ids, hidden]."""
    if model.config.tie_embeddings:
        return model.embeddings.index_select(0, ids)
    # However a linear layer keeps its weight, what it makes of the unit vectors are its columns.
    units = torch.eye(model.config.hidden_size, dtype=model.embeddings.dtype, device=model.embeddings.device)
    return model.lm_head(units).index_select(1, ids).t().contiguous()


def llama_target(context: ModuleContext) -> Llama:
    if not isinstance(context.target, Llama):
        raise UnsupportedModelError(f"no draft head can read a {type(context.target).__name__}; use ngram or suffix")
    return context.target


def read_head_config(directory: Path, target: ModelConfig) -> tuple[ModelConfig, HFConfig]:
    """The head's config.json. Raises UnsupportedModelError where it was made for another model."""
    hf = read_hf_config(directory)
    config = ModelConfig.from_hf(hf)
    check_fits(config, target)
    return config, hf


def check_fits(config: ModelConfig, target: ModelConfig) -> None:
    """Its KV lies in the target's blocks, it reads the target's states and tokens."""
    for name in ("hidden_size", "vocab_size", "num_kv_heads", "head_dim"):
        if (found := getattr(config, name)) != (wanted := getattr(target, name)):
            raise UnsupportedModelError(f"the draft head has {name} {found}, the model {wanted}: not a head for it")


def rope_of(config: ModelConfig, context: ModuleContext) -> torch.Tensor:
    """As long as the target's context, not the head's: a head trained on short texts still drafts in long ones."""
    table = cos_sin_table(config.layers[0].rope, config.head_dim, context.max_context)
    return table.to(context.placement.device)
