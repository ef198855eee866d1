"""A worker and a gateway without a model, for tests of what Ray does with their processes. Built inside the actors."""

from __future__ import annotations

import os
from uuid import uuid4

from baton.actors.messages import PeerAddress, WorkerInfo
from baton.cluster.config import ClusterConfig, WorkerSpec


class TinyWorker:
    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._heard: list[str] = []

    async def start(self) -> WorkerInfo:
        if self._spec.model == "broken":
            raise ValueError("these weights are broken")
        return WorkerInfo(
            peer=PeerAddress(self._spec.worker_id, "127.0.0.1:1", uuid4().hex),
            role=self._spec.role,
            model=self._spec.model_name,
            block_size=self._spec.engine.block_size,
            num_blocks=1,
            max_context=16,
            mover="local",
            metrics_address="127.0.0.1:2",
            pid=os.getpid(),
        )

    def stats(self) -> dict[str, object]:
        return {"heard": self._heard}

    async def peer_dead(self, incarnation: str) -> None:
        self._heard.append(incarnation)

    async def stop(self) -> None:
        pass


class TinyGateway:
    def __init__(self, config: ClusterConfig) -> None:
        self._port = config.router.port

    async def start(self) -> str:
        if self._port == 80:
            raise OSError(98, "Address already in use")
        return f"pid:{os.getpid()}"

    async def set_workers(self, workers: list[WorkerInfo]) -> None:
        pass

    async def stop(self) -> None:
        pass
