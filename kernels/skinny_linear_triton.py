"""Linear layers of 1 to 8 rows with what surrounds them, at the speed of reading the weights.

The contracts are `fused_linear`'s. One program owns some output features and streams their weights past all of x; the
norm's mean of squares is gathered on the way, since every program reads all of x anyhow. One row is a dot product per
feature on the CUDA cores; more rows use the tensor cores, with the rows padded to 16.

Measured on an H200, bf16, Llama-3.1-8B's shapes, under a CUDA graph (cuBLAS without norm, activation and residual):

    us (TB/s)         qkv           o             gate_up       down          head
    1 row             15.3 (3.3)    10.4 (3.2)    53.8 (4.4)    30.2 (3.9)    237 (4.4)
    1 row, cuBLAS     15.6          13.8          62.7          32.8          249
    8 rows            17.9 (2.8)    11.8 (2.8)    60.0 (3.9)    31.7 (3.7)    250 (4.2)
    8 rows, cuBLAS    16.8          13.4          62.8          32.6          251
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

MIN_DOT_ROWS = 16  # the tensor cores' smallest tile


class Tile(NamedTuple):
    features: int  # output features of one program
    width: int  # input features read at once
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class _Around:
    """What surrounds the linear layer."""

    norm: torch.Tensor | None = None
    eps: float = 0.0
    residual: torch.Tensor | None = None
    has_gate: bool = False


def skinny_norm_linear(h: torch.Tensor, norm: torch.Tensor, eps: float, weight: torch.Tensor) -> torch.Tensor:
    y = h.new_empty(h.shape[0], weight.shape[0])
    tile = Tile(8, 1024, 4, 2) if h.shape[0] == 1 else Tile(64, 128, 8, 5)
    _launch(tile, h, weight, y, _Around(norm, eps))
    return y


def skinny_norm_silu_linear(h: torch.Tensor, norm: torch.Tensor, eps: float, weight: torch.Tensor) -> torch.Tensor:
    y = h.new_empty(h.shape[0], weight.shape[0] // 2)
    tile = Tile(2, 2048, 8, 4) if h.shape[0] == 1 else Tile(64, 128, 8, 3)
    _launch(tile, h, weight, y, _Around(norm, eps, has_gate=True))
    return y


def skinny_linear_add(x: torch.Tensor, weight: torch.Tensor, h: torch.Tensor | None) -> torch.Tensor:
    y = x.new_empty(x.shape[0], weight.shape[0])
    tile = Tile(2, 2048, 4, 4) if x.shape[0] == 1 else Tile(32, 256, 4, 5)
    _launch(tile, x, weight, y, _Around(residual=h))
    return y


def _launch(tile: Tile, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, around: _Around) -> None:
    rows, features = y.shape
    kernel = _one_row_kernel if rows == 1 else _few_rows_kernel
    extra = {} if rows == 1 else {"rows": rows, "ROWS": MIN_DOT_ROWS, "WEIGHT_FIRST": tile.features >= 64}
    kernel[(features // tile.features,)](
        x,
        weight,
        y,
        around.norm,
        around.residual,
        features,
        around.eps,
        width=x.shape[1],
        FEATURES=tile.features,
        WIDTH=tile.width,
        HAS_GATE=around.has_gate,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **extra,
    )


@triton.jit
def _one_row_kernel(
    x, weight, y, norm, residual, features, eps,
    width: tl.constexpr, FEATURES: tl.constexpr, WIDTH: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    column = tl.arange(0, WIDTH)
    total = tl.zeros((FEATURES, WIDTH), tl.float32)
    up_total = tl.zeros((FEATURES, WIDTH), tl.float32)
    squares = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, width, WIDTH):
        values = tl.load(x + start + column).to(tl.float32)
        if norm is not None:
            squares += values * values
            values *= tl.load(norm + start + column).to(tl.float32)
        offsets = feature[:, None] * width + (start + column)[None, :]
        total += tl.load(weight + offsets, eviction_policy="evict_first").to(tl.float32) * values[None, :]
        if HAS_GATE:
            up = tl.load(weight + features * width + offsets, eviction_policy="evict_first")
            up_total += up.to(tl.float32) * values[None, :]
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
    WEIGHT_FIRST: tl.constexpr,
):  # fmt: skip
    # WEIGHT_FIRST computes the transpose, so that the wide side of the tensor cores' tile is the weights'.
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    total = tl.zeros((FEATURES, ROWS) if WEIGHT_FIRST else (ROWS, FEATURES), tl.float32)
    up_total = tl.zeros((FEATURES, ROWS) if WEIGHT_FIRST else (ROWS, FEATURES), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    for start in range(0, width, WIDTH):
        inside = (row < rows)[:, None]
        values = tl.load(x + row[:, None] * width + (start + column)[None, :], mask=inside, other=0.0)
        if norm is not None:
            wide = values.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            values = (wide * tl.load(norm + start + column).to(tl.float32)[None, :]).to(values.dtype)
        offsets = feature[:, None] * width + (start + column)[None, :]
        tile = tl.load(weight + offsets, eviction_policy="evict_first")
        total = tl.dot(tile, tl.trans(values), total) if WEIGHT_FIRST else tl.dot(values, tl.trans(tile), total)
        if HAS_GATE:
            tile = tl.load(weight + features * width + offsets, eviction_policy="evict_first")
            if WEIGHT_FIRST:
                up_total = tl.dot(tile, tl.trans(values), up_total)
            else:
                up_total = tl.dot(values, tl.trans(tile), up_total)
    if WEIGHT_FIRST:
        total, up_total = tl.trans(total), tl.trans(up_total)
    if norm is not None:
        scale = (1.0 / tl.sqrt(squares / width + eps))[:, None]
        total *= scale
        if HAS_GATE:
            total = total * tl.sigmoid(total) * (up_total * scale)
    offsets = row[:, None] * features + feature[None, :]
    mask = (row < rows)[:, None]
    if residual is not None:
        total += tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + offsets, total.to(y.dtype.element_ty), mask=mask)
