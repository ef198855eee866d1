"""A worker and a gateway without a model, for tests of what Ray does with their processes. Built inside the actors."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

from baton.actors.engine.updates import BlockCounts
from baton.actors.messages import PeerAddress, Role, WorkerInfo
from baton.cluster.config import ClusterConfig, WorkerSpec
from baton.router.usage import Usage


class TinyWorker:
    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._role = spec.role

    async def start(self) -> WorkerInfo:
        if self._spec.config.model == "broken":
            raise ValueError("these weights are broken")
        self.failed = asyncio.get_running_loop().create_future()
        self._incarnation = uuid4().hex
        return self.info()

    busy_s = 0.0

    def info(self) -> WorkerInfo:
        return WorkerInfo(
            peer=PeerAddress(self._spec.worker_id, "127.0.0.1:1", self._incarnation),
            role=self._role,
            model=self._spec.config.served_name,
            block_size=self._spec.config.engine.block_size,
            num_blocks=1,
            max_context=16,
            mover="local",
            metrics_address="127.0.0.1:2",
            pid=os.getpid(),
        )

    def set_role(self, role: Role) -> None:
        self._role = role

    async def drain(self, wait_s: float) -> None:
        pass

    async def profile(self, seconds: float) -> bytes:
        return b"trace"

    async def counts(self) -> BlockCounts:
        """A fragile one does not survive the question."""
        if self._spec.config.model == "fragile":
            self.failed.set_exception(RuntimeError("the engine is gone"))
        if os.environ.get("CUDA_VISIBLE_DEVICES") == self._spec.config.model.removeprefix("bad gpu "):
            self.failed.set_exception(RuntimeError("CUDA error: uncorrectable ECC error"))
        return BlockCounts(total=1, free=1, cached=0, held=0)

    async def peer_dead(self, incarnation: str) -> None:
        """Tell the test: the model's path is a folder of its."""
        (Path(self._spec.config.model) / f"{self._spec.worker_id}-heard-{incarnation}").touch()

    async def stop(self) -> None:
        pass


class TinyGateway:
    def usage(self) -> Usage:
        return Usage()

    def __init__(self, config: ClusterConfig, index: int) -> None:
        self._port = config.gateway_router(index).port

    async def start(self) -> str:
        if self._port == 80:
            raise OSError(98, "Address already in use")
        return f"pid:{os.getpid()}"

    async def set_workers(self, workers: Sequence[WorkerInfo], *, is_decoder_coming: bool = False) -> None:
        pass

    def is_connected(self) -> bool:
        return True

    async def stop(self) -> None:
        pass
