"""Builds a worker's engine from its config: model, KV memory, runner, and the layout that peers must share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.actors.config import WorkerConfig
from baton.actors.engine.engine import Engine
from baton.transfer.wire import KVLayout


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    engine: Engine
    kv: torch.Tensor  # contiguous, first dimension = blocks
    layout: KVLayout
    num_blocks: int
    max_context: int


def build_engine(config: WorkerConfig) -> BuiltEngine:
    raise NotImplementedError
