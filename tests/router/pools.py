"""Workers as a router sees them, in any state, without any worker."""

from __future__ import annotations

import numpy as np

from baton.actors.messages import Load, PeerAddress, Role, WorkerInfo
from baton.router.fleet import Pool, Roster, RoutedWorker

BLOCK = 16


def routed(
    worker_id: str, *, requests: int = 0, tokens: int = 0, dispatched: int = 0, role: Role = "both", **load: float
) -> RoutedWorker:
    """A worker whose last report says `requests` and `tokens`; `load` may say more of it."""
    info = WorkerInfo(
        peer=PeerAddress(worker_id, "127.0.0.1:1", worker_id),
        role=role,
        model="m",
        block_size=BLOCK,
        num_blocks=50_000,
        max_context=800_000,
        mover="",
        metrics_address="",
        pid=0,
    )
    worker = RoutedWorker(info)
    context = tokens * tokens / 2
    worker.take_load(Load(num_running=requests, waiting_tokens=tokens, waiting_context=context, **load))  # pyright: ignore[reportArgumentType]
    worker.num_dispatched = dispatched
    worker.refresh()
    return worker


def pool(*workers: RoutedWorker, cached: dict[int, int] | None = None) -> Pool:
    """`cached` tells, by position, how many leading blocks of the prompt workers hold."""
    tokens = np.array([BLOCK * (cached or {}).get(row, 0) for row in range(len(workers))], dtype=np.float64)
    for worker in workers:  # tests set what they like
        worker.refresh()
    return Pool(workers, Roster(workers).figures, tokens)
