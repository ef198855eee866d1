# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Trains a head, step by step, from a state that can be written and read back at any step.

The order of the data and the learning rate are functions of the step, so a run that was stopped and resumed ends in the
same weights as one that was not.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from baton.actors.drafter_training.heads import DraftHead, Eagle3Head, MtpHead
from baton.actors.drafter_training.objective import STEP_DECAY, Target, collate, plan_epoch, scores
from baton.actors.drafter_training.samples import Sample

_MOMENTS = ("exp_avg", "exp_avg_sq")
_EVALUATED_AT_ONCE = 8  # samples


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    epochs: int
    batch_size: int
    learning_rate: float
    num_steps: int  # unrolled draft steps
    seed: int
    warmup_steps: int = 40
    max_grad_norm: float = 1.0


@dataclass(frozen=True, slots=True)
class Progress:
    """A mean over the steps since the last one; `accuracy` is the share of right drafts per unrolled step."""

    step: int
    loss: float
    accuracy: tuple[float, ...]


@dataclass(slots=True)
class History:
    train: list[Progress] = field(default_factory=list[Progress])
    held_out: list[Progress] = field(default_factory=list[Progress])


class Trainer:
    def __init__(
        self, head: Eagle3Head | MtpHead, target: Target, samples: Sequence[Sample], config: TrainConfig
    ) -> None:
        self.head = head
        self.step = 0
        self.history = History()
        self._target = target
        self._samples = samples
        self._config = config
        self._lengths = [len(sample.tokens) for sample in samples]
        self._steps_per_epoch = -(-len(samples) // config.batch_size)
        self._optimizer = torch.optim.AdamW(head.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
        self._epoch: tuple[int, list[list[int]]] = (-1, [])

    @property
    def num_steps(self) -> int:
        return self._steps_per_epoch * self._config.epochs

    def run(self, num_steps: int) -> Progress:
        """Take `num_steps` steps, or as many as are left."""
        marks: list[list[float]] = []
        for _ in range(min(num_steps, self.num_steps - self.step)):
            marks.append(self._take_step())
        loss, *accuracy = (sum(column) / len(column) for column in zip(*marks, strict=True))
        self.history.train.append(Progress(self.step, loss, tuple(accuracy)))
        return self.history.train[-1]

    def evaluate(self, held_out: Sequence[Sample]) -> Progress:
        loss, accuracy = evaluate(self.head, self._target, held_out, self._config.num_steps)
        self.history.held_out.append(Progress(self.step, loss, accuracy))
        return self.history.held_out[-1]

    def _take_step(self) -> list[float]:
        device = self._target.device
        batch = collate([self._samples[i] for i in self._batch_indices(self.step)], device)
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate(self.step)
        self._optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=device)
        marks: list[float] = []
        with torch.autocast(device.type, dtype=torch.bfloat16):
            for i, score in enumerate(scores(self.head, batch, self._target, self._config.num_steps)):
                loss = loss + STEP_DECAY**i * score.loss
                marks.append(float(score.is_right.sum() / score.counts.sum()))
        loss.backward()
        nn.utils.clip_grad_norm_(self.head.parameters(), self._config.max_grad_norm)
        self._optimizer.step()
        self.step += 1
        return [loss.item(), *marks]

    def _batch_indices(self, step: int) -> list[int]:
        epoch, place = divmod(step, self._steps_per_epoch)
        if self._epoch[0] != epoch:
            order = random.Random(f"{self._config.seed}/{epoch}")
            self._epoch = (epoch, plan_epoch(self._lengths, self._config.batch_size, order))
        return self._epoch[1][place]

    def _learning_rate(self, step: int) -> float:
        warm = min(1.0, (step + 1) / self._config.warmup_steps)
        return self._config.learning_rate * warm * (0.05 + 0.95 * (1 + math.cos(math.pi * step / self.num_steps)) / 2)

    # The state on disk: weights and moments as safetensors, the rest as JSON.

    def save(self, folder: Path) -> None:
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in self.head.named_parameters()}
        tensors = {f"weight.{name}": parameter.detach() for parameter, name in names.items()}
        for parameter, state in self._optimizer.state.items():
            tensors |= {f"{moment}.{names[parameter]}": state[moment] for moment in _MOMENTS}
        record = msgspec.json.encode(_Record(self.step, self.history)).decode()
        partial = folder / "state.partial"
        save_file(tensors, partial, metadata={"record": record})
        os.replace(partial, folder / "state.safetensors")

    def load(self, folder: Path) -> bool:
        """Go on from what `save` wrote; False if there is nothing."""
        path = folder / "state.safetensors"
        if not path.exists():
            return False
        tensors, record = load_file(path), _read_record(path)
        self.step, self.history = record.step, record.history
        for name, parameter in self.head.named_parameters():
            parameter.data.copy_(tensors[f"weight.{name}"])
            if f"exp_avg.{name}" in tensors:
                moments = {moment: tensors[f"{moment}.{name}"].to(parameter.device) for moment in _MOMENTS}
                self._optimizer.state[parameter] = {"step": torch.tensor(float(self.step)), **moments}
        return True


class _Record(msgspec.Struct):
    step: int
    history: History


def _read_record(path: Path) -> _Record:
    handle: Any = safe_open(path, framework="pt")
    with handle as file:
        return msgspec.json.decode(file.metadata()["record"], type=_Record)


@torch.no_grad()
def evaluate(
    head: DraftHead, target: Target, samples: Sequence[Sample], num_steps: int
) -> tuple[float, tuple[float, ...]]:
    """The loss, and per unrolled step the share of right drafts."""
    right, counted, losses = [0] * num_steps, [0] * num_steps, list[float]()
    for start in range(0, len(samples), _EVALUATED_AT_ONCE):
        batch = collate(samples[start : start + _EVALUATED_AT_ONCE], target.device)
        loss = 0.0
        for i, score in enumerate(scores(head, batch, target, num_steps)):
            right[i] += int(score.is_right.sum())
            counted[i] += int(score.counts.sum())
            loss += STEP_DECAY**i * float(score.loss)
        losses.append(loss)
    return sum(losses) / len(losses), tuple(r / max(1, c) for r, c in zip(right, counted, strict=True))
