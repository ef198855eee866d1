# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
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
from baton.actors.engine.drafters.chain import head_rows
from baton.actors.engine.models.llama import Llama

STEP_DECAY = 0.8  # of a later unrolled step's weight in the loss
_BATCHES_SORTED_TOGETHER = 16


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded."""

    tokens: torch.Tensor  # [batch, length] int64
    features: torch.Tensor  # [batch, length, 3 * hidden] float32
    hidden: torch.Tensor  # [batch, length, hidden] float32
    is_there: torch.Tensor  # [batch, length] bool: no padding
    is_own: torch.Tensor  # [batch, length] bool: the token is the model's own


class Target(NamedTuple):
    """What of the target model a head leans on; nothing here is trained."""

    model: Llama
    rows: torch.Tensor  # [draft_vocab, hidden]: the head's rows of the draft vocabulary
    target_ids: torch.Tensor  # [draft_vocab] int64
    is_drafted: torch.Tensor  # [vocab] bool
    cos_sin: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.rows.device


class StepScore(NamedTuple):
    """One unrolled step's answers."""

    loss: torch.Tensor  # a scalar, the cross-entropy with the target's distribution over the draft vocabulary
    is_right: torch.Tensor  # [batch, length - 2] bool: a draft is wanted, and is the token that the model emitted
    counts: torch.Tensor  # likewise: a draft is wanted, since the token it stands for is the model's own


def make_target(model: Llama, target_ids: torch.Tensor, cos_sin: torch.Tensor) -> Target:
    device = model.embeddings.device
    target_ids = target_ids.to(device)
    is_drafted = torch.zeros(model.config.vocab_size, dtype=torch.bool, device=device)
    is_drafted[target_ids] = True
    return Target(model, head_rows(model, target_ids), target_ids, is_drafted, cos_sin.to(device))


def unroll(head: DraftHead, batch: Batch, target: Target, num_steps: int) -> Iterator[torch.Tensor]:
    """Run the head over the batch, feeding it the emitted tokens and its own outputs, which each step yields.

    Column p of step j reads token p + 1 + j and foresees token p + 2 + j; behind a sample's end nobody asks.
    """
    length = batch.tokens.shape[1] - 2  # columns that foresee something
    h = head.fuse(batch.features, batch.hidden)[:, :length]
    embedded = target.model.embed(batch.tokens)
    past = Unrolled()
    for step in range(num_steps):
        h = head.step(h, _shifted(embedded, 1 + step, length), target.cos_sin, past)
        yield h


def scores(head: DraftHead, batch: Batch, target: Target, num_steps: int) -> Iterator[StepScore]:
    for step, h in enumerate(unroll(head, batch, target, num_steps)):
        length = h.shape[1]
        # Prompts teach too: the target's distribution is known after each of their tokens.
        is_there = _shifted(batch.is_there, 2 + step, length)
        emitted = _shifted(batch.tokens, 2 + step, length)[is_there]
        logits = head.logits(h[is_there])
        scored = target.is_drafted[emitted]
        hidden = _shifted(batch.hidden, 1 + step, length)[is_there][scored]
        wanted = F.linear(target.model.normed(hidden), target.rows).softmax(dim=-1)
        loss = -(wanted * logits[scored].log_softmax(dim=-1)).sum() / max(1, len(wanted))
        counts = _shifted(batch.is_own, 2 + step, length)
        is_right = torch.zeros_like(counts)
        is_right[is_there] = target.target_ids[logits.detach().argmax(dim=-1)] == emitted
        yield StepScore(loss, is_right & counts, counts)


def _shifted(x: torch.Tensor, by: int, length: int) -> torch.Tensor:
    """Columns by .. by + length, with zeros behind the last."""
    moved = x[:, by : by + length]
    padding = torch.zeros((x.shape[0], length - moved.shape[1], *x.shape[2:]), dtype=x.dtype, device=x.device)
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


def collate(samples: Sequence[Sample], device: torch.device) -> Batch:
    pad = torch.nn.utils.rnn.pad_sequence
    tokens = pad([sample.tokens for sample in samples], batch_first=True)
    is_there, is_own = (torch.zeros(tokens.shape, dtype=torch.bool) for _ in range(2))
    for row, sample in enumerate(samples):
        is_there[row, : len(sample.tokens)] = True
        is_own[row, sample.prompt_len : len(sample.tokens)] = True
    features, hidden = (
        pad([getattr(sample, name) for sample in samples], batch_first=True).float() for name in ("features", "hidden")
    )
    return Batch(*(part.to(device) for part in (tokens, features, hidden, is_there, is_own)))
