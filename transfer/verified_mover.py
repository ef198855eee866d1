"""A `PlainMover` around another that proves each write: its blocks' fingerprints travel with its tag.

Both are computed on the device: of what is sent, before it leaves; of what came, when it has. A difference makes the
Arrival an erroneous one. To check only reads, so an arrival for blocks that are no longer the peer's does no harm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import torch

from baton.kernels.fingerprint import fingerprint_blocks
from baton.transfer.mover import Arrival, Completion, Incarnation, MemoryDescriptor, News, PlainMover, kv_rows


class Proof(msgspec.Struct, frozen=True, array_like=True):
    """What the inner mover carries in place of the tag."""

    tag: bytes
    block_bytes: int
    target: bytes  # int64
    fingerprints: bytes  # int64


_encode = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes], Proof] = msgspec.msgpack.Decoder(Proof).decode


class VerifiedMover:
    def __init__(self, mover: PlainMover, kv: torch.Tensor) -> None:
        self._mover = mover
        self._rows = kv_rows(kv)
        self._staging: list[torch.Tensor] = []
        self._stream = torch.cuda.Stream(kv.device, priority=-1) if kv.is_cuda else None
        fingerprint_blocks(self._rows, torch.zeros(0, dtype=torch.int64, device=kv.device))  # or fails at the start

    def describe(self) -> MemoryDescriptor:
        """The mover's name says that it proves: peers must both do so."""
        memory = self._mover.describe()
        return msgspec.structs.replace(memory, mover=f"{memory.mover}+verify")

    def connect(self, peer: Incarnation, memory: MemoryDescriptor) -> None:
        self.describe().check_mover(peer, memory)
        self._mover.connect(peer, msgspec.structs.replace(memory, mover=self._mover.describe().mover))

    def disconnect(self, peer: Incarnation) -> None:
        self._mover.disconnect(peer)

    def stage(self, memory: torch.Tensor) -> int:
        self._staging.append(kv_rows(memory))
        return self._mover.stage(memory)

    def write(
        self, peer: Incarnation, source: np.ndarray, target: np.ndarray, tag: bytes, staging: int | None = None
    ) -> int:
        rows = self._rows if staging is None else self._staging[staging]
        sent = self._fingerprints(rows, source)
        proof = Proof(tag, rows.shape[1], target.tobytes(), sent.tobytes())
        return self._mover.write(peer, source, target, _encode(proof), staging)

    def poll(self) -> News:
        news = self._mover.poll()
        return News([self._plain(one) for one in news.completions], [self._checked(one) for one in news.arrivals])

    def close(self) -> None:
        self._mover.close()

    def _plain(self, completion: Completion) -> Completion:
        return replace(completion, tag=_decode(completion.tag).tag)

    def _checked(self, arrival: Arrival) -> Arrival:
        proof = _decode(arrival.tag)
        target = np.frombuffer(proof.target, np.int64)
        came = self._fingerprints(self._rows.view(-1, proof.block_bytes), target)
        wrong = target[came != np.frombuffer(proof.fingerprints, np.int64)]
        error = f"blocks {wrong.tolist()} do not hold what {arrival.peer} has sent" if len(wrong) else None
        return Arrival(arrival.peer, proof.tag, error)

    def _fingerprints(self, rows: torch.Tensor, blocks: np.ndarray) -> np.ndarray:
        with torch.cuda.stream(self._stream):  # None: whatever is current
            return fingerprint_blocks(rows, torch.tensor(blocks, device=rows.device)).cpu().numpy()
