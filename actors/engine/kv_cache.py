"""The KV cache as memory: one block-first tensor, so that a block is one contiguous range over all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.actors.engine.model_config import ModelConfig


class KVMemoryError(ValueError):
    """The memory given to the KV cache does not hold what was asked for."""


@dataclass(frozen=True, slots=True)
class KVSpec:
    num_layers: int
    block_size: int  # tokens per block
    num_kv_heads: int  # of this rank
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of_model(
        cls, config: ModelConfig, block_size: int, dtype: torch.dtype, world: int = 1, num_draft_layers: int = 0
    ) -> KVSpec:
        """Describe the share of one of `world` ranks; a draft module's layers come last."""
        num_layers = config.num_layers + num_draft_layers
        return cls(num_layers, block_size, config.num_kv_heads // world, config.head_dim, dtype)

    @property
    def token_bytes(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.token_bytes

    def num_blocks(self, memory_bytes: int, extra_bytes: int = 0) -> int:
        """How many blocks fit, each with `extra_bytes` beside it."""
        num_blocks = memory_bytes // (self.block_bytes + extra_bytes)
        if num_blocks < 1:
            raise KVMemoryError(f"{memory_bytes} bytes of KV memory hold no block: one takes {self.block_bytes} bytes")
        return num_blocks

    def allocate(self, num_blocks: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim], zeroed, so that no place holds a NaN."""
        shape = (num_blocks, self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=device)
