"""Tells a slow path between GPUs, such as TCP where there is NVLink, from what was actually moved over it."""

from __future__ import annotations

from collections import Counter

from baton.transfer.mover import Completion, Incarnation

MIN_BYTES = 16 * 2**20  # of a write whose time says something of its link
SLOW_BYTES_PER_S = 8e9  # below every link that is meant for this: 100 Gb/s RDMA carries 12e9, PCIe 4 25e9
NUM_SLOW = 3  # in a row; the first write to a peer also builds the connection


class SlowLinks:
    def __init__(self, *, is_gpu: bool) -> None:
        self._is_gpu = is_gpu
        self._num_slow: Counter[Incarnation] = Counter()

    def note(self, completion: Completion) -> str | None:
        """Return what to tell the operator, once for each peer."""
        if not self._is_gpu or completion.num_bytes < MIN_BYTES or completion.seconds <= 0:
            return None
        rate = completion.num_bytes / completion.seconds
        if rate >= SLOW_BYTES_PER_S:
            self._num_slow.pop(completion.peer, None)
            return None
        self._num_slow[completion.peer] += 1
        if self._num_slow[completion.peer] != NUM_SLOW:
            return None
        return (
            f"KV goes to {completion.peer} at {rate / 1e9:.1f} GB/s, slower than any link between GPUs: "
            f"see `baton doctor`, and UCX_TLS if it is set"
        )
