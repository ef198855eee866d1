"""Two workers with a draft head, on one stream and over NIXL: as with one worker, and as without the head."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import test_head_speculation as in_process
from tiny_samples import CONFIG, Tiny

from baton.actors.drafter_training.export import export_head
from baton.actors.drafter_training.train import Trainer
from baton.actors.messages import PeerAddress
from baton.actors.worker import Worker
from baton.transfer.config import TransferConfig
from tests.actors.worker_client import Client, settled


@pytest.fixture(scope="module")
def head(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, trained = tmp_path_factory.mktemp("head"), tiny.head("eagle3")
    Trainer(trained, tiny.target, tiny.samples, CONFIG).run(16)
    export_head(trained, trained.config, tiny.model.config, tiny.target.target_ids, folder)
    return {"drafter": "eagle", "model": str(folder)}


@asynccontextmanager
async def workers(model: Path, head: dict[str, Any]) -> AsyncIterator[tuple[Worker, Worker]]:
    config = in_process.config_of(model, head).model_copy(update={"transfer": TransferConfig(mover="nixl")})
    started: list[Worker] = []
    try:
        for name in ("p", "d"):
            started.append(Worker(worker_id=name, role="both", config=config))
            await started[-1].start()
        yield started[0], started[1]
    finally:
        for worker in reversed(started):
            await worker.stop()


async def answers(worker: Worker, prefill: PeerAddress | None) -> list[list[int]]:
    async with Client(worker.info().peer.address) as client:
        said: list[list[int]] = []
        for one in in_process.requests():
            outputs = await client.finish(one, prefill)
            served = outputs[-1].served
            is_long = len(one.tokens) > 4  # what fits into one block is not worth a hand-over
            assert served is not None and served.prefill_worker == ("p" if prefill and is_long else "d")
            said.append([token for output in outputs for token in output.tokens])
    await settled(worker)
    return said


async def test_a_hand_over_between_workers_changes_no_token(tiny: Tiny, head: dict[str, Any]):
    expected = [said.tokens for said in in_process.run(in_process.build(tiny.path, None), in_process.requests())]
    async with workers(tiny.path, head) as (prefill, decode):
        assert await answers(decode, prefill.info().peer) == expected
        assert await answers(decode, None) == expected
        await settled(prefill)
