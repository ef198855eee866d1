"""Linear layers of 1 to 16 rows with what surrounds them, at the speed of reading the weights.

The contracts are `fused_linear`'s. One program owns some output features and streams their weights past all of x; the
norm's mean of squares is gathered on the way, since every program reads all of x anyhow. One row is a dot product per
feature on the CUDA cores; more rows use the tensor cores, with the rows padded to 16.

Measured on an H200, bf16, Llama-3.1-8B's shapes, under a CUDA graph (cuBLAS without norm, activation and residual):

    us (TB/s)         qkv           o             gate_up       down          head
    1 row             15.3 (3.3)    10.4 (3.2)    53.8 (4.4)    30.2 (3.9)    237 (4.4)
    1 row, cuBLAS     15.6          13.8          62.7          32.8          249
    8 rows            15.9 (3.2)    11.6 (2.9)    57.1 (4.1)    30.8 (3.8)    241 (4.4)
    8 rows, cuBLAS    16.8          13.4          62.8          32.6          251

Splitting a tile's input features among programs was tried for the smaller two, and won nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from baton.kernels.triton_pdl import pdl, start_next, wait_for_previous

MIN_DOT_ROWS = 16  # the tensor cores' smallest tile


class Tile(NamedTuple):
    features: int  # output features of one program
    width: int  # input features read at once
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Around:
    """What surrounds the linear layer."""

    norm: torch.Tensor | None = None
    eps: float = 0.0
    residual: torch.Tensor | None = None
    has_gate: bool = False


def skinny_norm_linear(h: torch.Tensor, norm: torch.Tensor, eps: float, weight: torch.Tensor) -> torch.Tensor:
    is_head = weight.shape[0] > 32768
    few = Tile(128, 128, 8, 3) if is_head else Tile(64, 256, 4, 4)
    tile = Tile(8, 1024, 4, 2) if h.shape[0] == 1 else few
    return run_skinny(tile, h, weight, weight.shape[0], Around(norm, eps))


def skinny_norm_silu_linear(h: torch.Tensor, norm: torch.Tensor, eps: float, weight: torch.Tensor) -> torch.Tensor:
    tile = Tile(2, 2048, 8, 4) if h.shape[0] == 1 else Tile(128, 128, 8, 3)
    return run_skinny(tile, h, weight, weight.shape[0] // 2, Around(norm, eps, has_gate=True))


def skinny_linear_add(x: torch.Tensor, weight: torch.Tensor, h: torch.Tensor | None) -> torch.Tensor:
    tile = Tile(2, 2048, 4, 4) if x.shape[0] == 1 else Tile(32, 256, 4, 6)
    return run_skinny(tile, x, weight, weight.shape[0], Around(residual=h))


def run_skinny(tile: Tile, x: torch.Tensor, weight: torch.Tensor, features: int, around: Around) -> torch.Tensor:
    """Compute [num_rows, features] with the given tile."""
    rows, width = x.shape
    y = x.new_empty(rows, features)
    common = (x, weight, y, around.norm, around.residual, features, around.eps)
    shape = {"width": width, "FEATURES": tile.features, "WIDTH": tile.width, "HAS_GATE": around.has_gate}
    launch = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, **pdl()}
    grid = (features // tile.features,)
    if rows == 1:
        _one_row_kernel[grid](*common, **shape, **launch)
    else:
        _few_rows_kernel[grid](*common, rows, ROWS=MIN_DOT_ROWS, **shape, **launch)
    return y


@triton.jit
def _one_row_kernel(
    x, weight, y, norm, residual, features, eps,
    width: tl.constexpr, FEATURES: tl.constexpr, WIDTH: tl.constexpr, HAS_GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    column = tl.arange(0, WIDTH)
    gates = weight + feature[:, None] * width + column[None, :]
    ups = gates + features * width
    # The first tile of weights comes while the kernel before still drains.
    gate = tl.load(gates, eviction_policy="evict_first").to(tl.float32)
    if HAS_GATE:
        up = tl.load(ups, eviction_policy="evict_first").to(tl.float32)
    wait_for_previous(PDL)
    values, squares = _normed(tl.load(x + column), norm, column)
    total = gate * values[None, :]
    if HAS_GATE:
        up_total = up * values[None, :]
    for start in range(WIDTH, width, WIDTH):
        values, more = _normed(tl.load(x + start + column), norm, start + column)
        squares += more
        total += tl.load(gates + start, eviction_policy="evict_first").to(tl.float32) * values[None, :]
        if HAS_GATE:
            up_total += tl.load(ups + start, eviction_policy="evict_first").to(tl.float32) * values[None, :]
    result = tl.sum(total, 1)
    if norm is not None:
        scale = 1.0 / tl.sqrt(tl.sum(squares) / width + eps)
        result *= scale
        if HAS_GATE:
            result = result * tl.sigmoid(result) * (tl.sum(up_total, 1) * scale)
    if residual is not None:
        result += tl.load(residual + feature).to(tl.float32)
    tl.store(y + feature, result.to(y.dtype.element_ty))


@triton.jit
def _few_rows_kernel(
    x, weight, y, norm, residual, features, eps, rows,
    width: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr, WIDTH: tl.constexpr, HAS_GATE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    # The weights are the left operand: their side of the tensor cores' tile is the wide one.
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = row < rows
    gates = weight + feature[:, None] * width + column[None, :]
    ups = gates + features * width
    cells = x + row[:, None] * width + column[None, :]
    gate = tl.load(gates, eviction_policy="evict_first")
    if HAS_GATE:
        up = tl.load(ups, eviction_policy="evict_first")
    wait_for_previous(PDL)
    values, squares = _normed_rows(tl.load(cells, mask=inside[:, None], other=0.0), norm, column)
    total = tl.dot(gate, tl.trans(values))
    if HAS_GATE:
        up_total = tl.dot(up, tl.trans(values))
    for start in range(WIDTH, width, WIDTH):
        tile = tl.load(cells + start, mask=inside[:, None], other=0.0)
        values, more = _normed_rows(tile, norm, start + column)
        squares += more
        total = tl.dot(tl.load(gates + start, eviction_policy="evict_first"), tl.trans(values), total)
        if HAS_GATE:
            up_total = tl.dot(tl.load(ups + start, eviction_policy="evict_first"), tl.trans(values), up_total)
    if norm is not None:
        scale = (1.0 / tl.sqrt(squares / width + eps))[None, :]
        total *= scale
        if HAS_GATE:
            total = total * tl.sigmoid(total) * (up_total * scale)
    offsets = row[None, :] * features + feature[:, None]
    if residual is not None:
        total += tl.load(residual + offsets, mask=inside[None, :], other=0.0).to(tl.float32)
    tl.store(y + offsets, total.to(y.dtype.element_ty), mask=inside[None, :])


@triton.jit
def _normed(values, norm, column):
    """A part of one row [WIDTH] times the norm's weight, float32; and its squares."""
    values = values.to(tl.float32)
    squares = values * values
    if norm is not None:
        values *= tl.load(norm + column).to(tl.float32)
    return values, squares


@triton.jit
def _normed_rows(tile, norm, column):
    """A part of the rows [ROWS, WIDTH] times the norm's weight, in its own dtype; and each row's sum of squares."""
    wide = tile.to(tl.float32)
    squares = tl.sum(wide * wide, 1)
    if norm is not None:
        tile = (wide * tl.load(norm + column).to(tl.float32)[None, :]).to(tile.dtype)
    return tile, squares
