"""Memory that blocks are packed into before they go to peers of another form, and the forms that they travel in.

A block travels as it is, or compressed: FP8 values with a scale for each layer, K or V, and head, then those scales.
A compressed one is written as the first few of SLICES equal slices of the place that the whole one will fill; the
receiver expands it there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from baton.kernels.kv_pack import join_heads, pack_into
from baton.kernels.kv_quant import QuantisedKV, dequantise_kv, quantise_kv
from baton.transfer.mover import PlainMover, TransferError, kv_rows
from baton.transfer.route import SLICES, Route

NUM_BUFFERS = 2  # one is packed while the other is sent


def compressed_slices(kv: torch.Tensor) -> int:
    """How many of a block's slices its compressed form fills. Raises TransferError where it cannot be compressed."""
    _, num_layers, two, _, num_kv_heads, _ = kv.shape
    numel = kv[0].numel()
    if not kv.is_floating_point() or kv.dtype.itemsize < 2 or kv[0].nbytes % (SLICES * num_kv_heads):
        raise TransferError(
            f"transfer.compress halves 16-bit KV in blocks of a multiple of {SLICES} bytes a head; this is {kv.dtype}, "
            f"{kv[0].nbytes} bytes a block of {num_kv_heads} heads; leave it off"
        )
    return -(-(numel + 4 * num_layers * two * num_kv_heads) * SLICES // kv[0].nbytes)


@dataclass(frozen=True, slots=True)
class Packed:
    """Blocks in a buffer, or there once `done` has happened."""

    buffer: int
    sources: tuple[np.ndarray, ...]  # for each part, what of the staging memory to send
    done: torch.cuda.Event | None


class Staging:
    """For peers whose blocks have one form. `handle` names its memory to the mover."""

    def __init__(self, mover: PlainMover, kv: torch.Tensor, route: Route, max_write_blocks: int) -> None:
        self._kv = kv
        self._parts = route.parts
        self._used = route.compressed
        recut = kv.shape[3] // route.block_size
        self._buffer_blocks = route.parts * (max_write_blocks + max(0, recut - 1))  # a write may begin inside a block
        heads = kv.shape[4] // route.parts
        shape = (*kv.shape[1:3], route.block_size, heads, kv.shape[5])
        num_blocks = NUM_BUFFERS * self._buffer_blocks
        try:
            self._blocks = torch.zeros(num_blocks, *shape, dtype=kv.dtype, device=kv.device)
            self._wire = self._blocks
            if self._used:
                self._check_slices()
                slice_bytes = self._blocks[0].nbytes // SLICES
                self._wire = torch.zeros(num_blocks * self._used, slice_bytes, dtype=torch.uint8, device=kv.device)
        except torch.OutOfMemoryError as error:
            raise TransferError(f"no memory to stage {num_blocks} blocks of {route.block_size} tokens") from error
        self.handle = mover.stage(self._wire)
        self.free = list(range(NUM_BUFFERS))
        self._stream = torch.cuda.Stream(kv.device, priority=-1) if kv.is_cuda else None  # ahead of prefill's kernels

    @torch.inference_mode()
    def pack(self, source: np.ndarray) -> Packed:
        """Pack what rows of `route.source_blocks` name into a free buffer."""
        ours, theirs = self._kv.shape[3], self._blocks.shape[3]
        buffer, skip = self.free.pop(), 0
        if theirs > ours:
            blocks = source[source >= 0]
        else:
            named = source[:, 0]
            skip = int(named[0]) % (ours // theirs)
            owners = named // (ours // theirs)
            blocks = owners[np.diff(owners, prepend=-1) != 0]
        length, start = skip + len(source), buffer * self._buffer_blocks
        with torch.cuda.stream(self._stream):
            self._fill(torch.tensor(blocks, device=self._kv.device), start, length)
            done = None if self._stream is None else torch.cuda.Event()
            if done is not None:
                done.record()
        firsts = (start + part * length + skip for part in range(self._parts))
        return Packed(buffer, tuple(self._named(first, len(source)) for first in firsts), done)

    def _fill(self, blocks: torch.Tensor, start: int, length: int) -> None:
        end = start + self._parts * length
        packed = self._blocks[start:end]
        pack_into(self._kv, blocks, packed.view(self._parts, length, *packed.shape[1:]))
        if self._used:
            values, scales = quantise_kv(packed)
            wire = self._wire[start * self._used : end * self._used].view(end - start, -1)
            numel, scale_bytes = packed[0].numel(), scales[0].nbytes
            wire[:, :numel] = values.view(torch.uint8).view(end - start, -1)
            wire[:, numel : numel + scale_bytes] = scales.view(end - start, -1).view(torch.uint8)

    def _named(self, first: int, num: int) -> np.ndarray:
        used = self._used or 1
        return np.arange(first * used, (first + num) * used)

    def _check_slices(self) -> None:
        if (ours := compressed_slices(self._blocks)) != self._used:
            raise TransferError(f"a compressed block is {ours} slices here, but {self._used} at the peer")


@torch.inference_mode()
def restore(kv: torch.Tensor, blocks: torch.Tensor, parts: int, *, compressed: bool) -> None:
    """Make `blocks` what they are to be, where a peer wrote them in `parts` stretches of heads, or compressed."""
    num_layers, two, block_size, num_kv_heads, head_dim = kv.shape[1:]
    heads = num_kv_heads // parts
    stretches = kv[blocks].view(-1, num_layers, two, block_size, heads, head_dim)
    if compressed:
        rows, numel = kv_rows(stretches), stretches[0].numel()
        values = rows[:, :numel].contiguous().view(torch.float8_e4m3fn).view(stretches.shape)
        scales = rows[:, numel : numel + 4 * num_layers * two * heads].contiguous().view(torch.float32)
        stretches = dequantise_kv(QuantisedKV(values, scales.view(-1, num_layers, two, heads)), kv.dtype)
    kv[blocks] = join_heads(stretches, parts)
