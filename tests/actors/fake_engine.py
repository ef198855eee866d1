"""A real engine on a fake device whose KV lies in a real tensor: moving the wrong bytes changes the text."""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np
import torch

from baton.actors.build import BuiltEngine
from baton.actors.config import WorkerConfig
from baton.actors.engine.drafters.build import make_speculation
from baton.actors.engine.engine import Engine
from baton.actors.engine.grammar import GrammarStore
from baton.actors.engine.vocabulary import Vocabulary
from baton.transfer.wire import KVLayout
from tests.fakes import FakeRunner

LAYOUT = KVLayout(
    model="fake",
    weights_version="1",
    dtype="uint64",
    block_size=4,
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
    attention_scale=1.0,
    rope="none",
)


NO_GRAMMARS = GrammarStore(lambda: Vocabulary((), ()), 0)


def build_fake_engine(config: WorkerConfig, step_s: float = 0.0) -> BuiltEngine:
    """Build an engine on a FakeRunner; `engine.num_blocks` must be set."""
    assert config.engine.num_blocks is not None
    num_blocks, block_size = config.engine.num_blocks, config.engine.block_size
    runner = FakeRunner(num_blocks, block_size, step_s=step_s)
    runner.launched = deque(maxlen=1)  # type: ignore[assignment]  # a worker that lives long must not keep them all
    kv = torch.full((num_blocks, 1, 1, block_size, 1, 1), -1, dtype=torch.int64)  # the shape of a real cache
    cells: np.ndarray = kv.view(num_blocks, block_size).numpy().view(np.uint64)
    runner.kv = [memoryview(row) for row in cells]  # type: ignore[misc]  # ints in and out, bytes shared with kv
    max_context = config.engine.max_context or 1000
    speculation = make_speculation(config.engine.speculation, None, NO_GRAMMARS, overlap=True)
    engine = Engine(
        config.engine,
        runner,
        num_blocks=num_blocks,
        max_context=max_context,
        eos_token_ids=frozenset({0}),
        speculation=speculation,
    )
    return BuiltEngine(
        engine=engine, kv=kv, layout=msgspec.structs.replace(LAYOUT, block_size=block_size),
        num_blocks=num_blocks, max_context=max_context, drafts=speculation.counts,
    )  # fmt: skip
