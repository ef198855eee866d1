"""What a draft module is built from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baton.actors.engine.drafters.config import SpeculationConfig
from baton.actors.engine.models.model import Model
from baton.actors.engine.weights import Placement
from baton.kernels.attention import AttentionBackend, AttentionShape


@dataclass(frozen=True, slots=True)
class ModuleContext:
    """All that a draft module is built from, on every rank."""

    config: SpeculationConfig
    target: Model
    target_path: Path  # of its checkpoint, which may hold the module's weights too
    placement: Placement
    block_size: int
    max_context: int
    num_slots: int
    make_attention: Callable[[AttentionShape], AttentionBackend]  # a backend of the module's own
