"""The table of RoPE's cosines and sines for every position a model may see."""

from __future__ import annotations

import math

import torch

from baton.actors.engine.model_config import RopeConfig


def cos_sin_table(
    rope: RopeConfig, head_dim: int, max_context: int, freq_factors: torch.Tensor | None = None
) -> torch.Tensor:
    """[max_context, head_dim] float32 on the CPU: cosines, then sines. `freq_factors` divide the frequencies (GGUF)."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / rope.theta**exponent  # [head_dim / 2]
    if freq_factors is not None:
        frequencies /= freq_factors
    elif rope.kind == "linear":
        frequencies /= rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3(frequencies, rope)
    angles = torch.arange(max_context, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Slow what turns less than `low` times in the original context, keep what turns over `high`, blend the rest."""
    turns = rope.original_context * frequencies / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return frequencies * (kept + (1 - kept) / rope.factor)
