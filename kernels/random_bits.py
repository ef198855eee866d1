"""Counter-based Gumbel noise: a pure function of (seed, position, token id), equal on every device.

Each row's 64-bit key is splitmix64 of its seed, advanced by the position and mixed again (constants of Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", 2014). Its halves key one pass of the 32-bit mixer "lowbias32"
(multipliers 0x7feb352d, 0x846ca68b; C. Wellons, hash-prospector, 2018) over the token ids.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

GOLDEN_64 = 0x9E3779B97F4A7C15
MIX_64 = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
GOLDEN_32 = 0x9E3779B1  # spreads neighbouring token ids before the key is added
MIX_32 = (0x7FEB352D, 0x846CA68B)
MAX_UNIFORM = 1 - 2**-24  # the float32 below 1: keeps the noise finite


class RowKeys(NamedTuple):
    """Two 32-bit keys per row, as int32 bit patterns [num_rows]."""

    low: torch.Tensor
    high: torch.Tensor


def row_keys(seeds: torch.Tensor, positions: torch.Tensor) -> RowKeys:
    """Mix seeds and positions, [num_rows] int64 each."""
    key = _splitmix64(seeds)
    key = _splitmix64(key + (positions + 1) * _signed(GOLDEN_64, 64))
    halves = key.view(torch.int32).view(-1, 2)  # little-endian: low half first
    return RowKeys(halves[:, 0], halves[:, 1])


def token_bits(keys: RowKeys, vocab: int) -> torch.Tensor:
    """32 random bits per row and token id, as int32 bit patterns [num_rows, vocab]; integer overflow wraps."""
    ids = torch.arange(vocab, dtype=torch.int32, device=keys.low.device)
    bits = ids * _signed(GOLDEN_32, 32) + keys.low[:, None]
    _xor_shift(bits, 16)
    bits.mul_(_signed(MIX_32[0], 32)).bitwise_xor_(keys.high[:, None])
    _xor_shift(bits, 15)
    bits.mul_(_signed(MIX_32[1], 32))
    _xor_shift(bits, 16)
    return bits


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, vocab: int) -> torch.Tensor:
    """Standard Gumbel noise [num_rows, vocab] float32, finite everywhere.

    -log1p(-u) with u near 0 carries full precision where it matters: small exponentials are large Gumbels, which
    decide how often an unlikely token wins.
    """
    bits = token_bits(row_keys(seeds, positions), vocab)
    uniform = bits.view(torch.uint32).float().add_(0.5).mul_(2**-32).clamp_(max=MAX_UNIFORM)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _splitmix64(state: torch.Tensor) -> torch.Tensor:
    state = (state ^ _shift_right(state, 30)) * _signed(MIX_64[0], 64)
    state = (state ^ _shift_right(state, 27)) * _signed(MIX_64[1], 64)
    return state ^ _shift_right(state, 31)


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64 right without copies of the sign bit."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _xor_shift(value: torch.Tensor, bits: int) -> None:
    value.bitwise_xor_((value >> bits).bitwise_and_((1 << (32 - bits)) - 1))


def _signed(value: int, width: int) -> int:
    return value - (1 << width) if value >> (width - 1) else value
