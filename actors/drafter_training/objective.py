"""Batches of samples, and what a head is asked on them: the target's distribution after each of its own tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from baton.actors.drafter_training.heads import DraftHead, Unrolled
from baton.actors.drafter_training.samples import Sample
from baton.actors.engine.models.llama import Llama

STEP_DECAY = 0.8  # of a later unrolled step's weight in the loss
_BATCHES_SORTED_TOGETHER = 16


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded. mask: whether the token after a position is the model's own."""

    tokens: torch.Tensor  # [batch, length] int64
    features: torch.Tensor  # [batch, length, 3 * hidden] float32
    hidden: torch.Tensor  # [batch, length, hidden] float32
    mask: torch.Tensor  # [batch, length] bool


class Target(NamedTuple):
    """What of the target model a head leans on; nothing here is trained."""

    model: Llama
    rows: torch.Tensor  # [draft_vocab, hidden]: the head's rows of the draft vocabulary
    target_ids: torch.Tensor  # [draft_vocab] int64
    is_drafted: torch.Tensor  # [vocab] bool
    cos_sin: torch.Tensor


class StepScore(NamedTuple):
    """One unrolled step's answers, at every place that counts."""

    loss: torch.Tensor  # a scalar, the cross-entropy with the target's distribution over the draft vocabulary
    is_right: torch.Tensor  # [batch, length - 2] bool: the likeliest draft is the token that the model emitted
    counts: torch.Tensor  # likewise: somebody asks for a draft there


def make_target(model: Llama, target_ids: torch.Tensor, max_len: int, cos_sin: torch.Tensor) -> Target:
    is_drafted = torch.zeros(model.config.vocab_size, dtype=torch.bool)
    is_drafted[target_ids] = True
    return Target(model, model.embeddings[target_ids], target_ids, is_drafted, cos_sin[: max_len + 16])


def scores(head: DraftHead, batch: Batch, target: Target, num_steps: int) -> Iterator[StepScore]:
    """Unroll the head over the batch, feeding it the emitted tokens and its own outputs.

    Column p of step j reads token p + 1 + j and foresees token p + 2 + j. Behind a sample's end it reads padding, and
    is not asked.
    """
    length = batch.tokens.shape[1] - 2  # columns that foresee something
    h = head.fuse(batch.features, batch.hidden)[:, :length]
    embedded = target.model.embed(batch.tokens)
    past = Unrolled()
    for step in range(num_steps):
        h = head.step(h, _shifted(embedded, 1 + step, length), target.cos_sin, past)
        counts = _shifted(batch.mask, 1 + step, length)
        emitted = _shifted(batch.tokens, 2 + step, length)[counts]
        logits = head.logits(h[counts])
        scored = target.is_drafted[emitted]
        hidden = _shifted(batch.hidden, 1 + step, length)[counts][scored]
        wanted = F.linear(target.model.normed(hidden), target.rows).softmax(dim=-1)
        loss = -(wanted * logits[scored].log_softmax(dim=-1)).sum(dim=-1).mean()
        is_right = torch.zeros_like(counts)
        is_right[counts] = target.target_ids[logits.detach().argmax(dim=-1)] == emitted
        yield StepScore(loss, is_right, counts)


def _shifted(x: torch.Tensor, by: int, length: int) -> torch.Tensor:
    """Columns by .. by + length, with zeros behind the last."""
    moved = x[:, by : by + length]
    padding = torch.zeros((x.shape[0], length - moved.shape[1], *x.shape[2:]), dtype=x.dtype)
    return torch.cat((moved, padding), dim=1)


def plan_epoch(lengths: Sequence[int], size: int, order: random.Random) -> list[list[int]]:
    """Deal samples into batches of like length, in a random order."""
    indices = list(range(len(lengths)))
    order.shuffle(indices)
    window = size * _BATCHES_SORTED_TOGETHER
    dealt: list[list[int]] = []
    for start in range(0, len(indices), window):
        near = sorted(indices[start : start + window], key=lambda i: lengths[i])
        dealt += [near[i : i + size] for i in range(0, len(near), size)]
    order.shuffle(dealt)
    return dealt


def collate(samples: Sequence[Sample]) -> Batch:
    pad = torch.nn.utils.rnn.pad_sequence
    tokens = pad([sample.tokens for sample in samples], batch_first=True)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, sample in enumerate(samples):
        mask[row, sample.prompt_len - 1 : len(sample.tokens) - 1] = True
    features = pad([sample.features for sample in samples], batch_first=True).float()
    return Batch(tokens, features, pad([sample.hidden for sample in samples], batch_first=True).float(), mask)
