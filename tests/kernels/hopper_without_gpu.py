# pyright: basic, reportArgumentType=false
"""Compile every Triton kernel for sm_90 by launching each public Triton function on CPU tensors, with no GPU.

Run as a program, by test_compile.py: the interpreter that the other tests choose cannot be left within a process.
Prints one line per compiled kernel.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from baton.kernels.attention import AttentionShape, StepLayout
from baton.kernels.attention_triton import TritonAttention
from baton.kernels.fingerprint_triton import fingerprint_triton
from baton.kernels.gated_activation_triton import gated_activation_triton
from baton.kernels.kv_pack_triton import pack_triton
from baton.kernels.kv_quant_triton import dequantise_kv_triton, quantise_kv_triton
from baton.kernels.rms_norm_triton import rms_norm_triton
from baton.kernels.rope_store import QKNorm, TokenPlaces
from baton.kernels.rope_store_triton import rope_and_store_triton
from baton.kernels.sampling import LogitBias, Penalties, SamplingTensors
from baton.kernels.sampling_triton import sample_triton
from baton.kernels.skinny_linear_triton import skinny_linear_add, skinny_norm_linear, skinny_norm_silu_linear
from baton.kernels.verify_rejection_triton import rejection_ids_triton

BF16 = torch.bfloat16
SHAPE = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, block_size=16, scale=0.1)


class HopperDriver:
    """Stands for an H200 that loads every binary and launches nothing."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *args: None

    @property
    def utils(self) -> SimpleNamespace:
        return SimpleNamespace(get_device_properties=self._properties, load_binary=self._load)

    def _properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10, "multiprocessor_count": 132}

    def _load(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        print(f"compiled {name}: {len(binary)} bytes, {shared} bytes of shared memory")
        return (0, 0, 0, 0, 1024)


def elementwise() -> None:
    x, weight = torch.zeros(4, 4096, dtype=BF16), torch.zeros(4096, dtype=BF16)
    rms_norm_triton(x, weight, 1e-5)
    gated_activation_triton(x, "silu")
    gated_activation_triton(x, "gelu_tanh")


def cache() -> None:
    kv = torch.zeros(8, 2, 2, 16, 8, 128, dtype=BF16)
    four = torch.zeros(4, dtype=torch.int64)
    weight = torch.zeros(128, dtype=BF16)
    for norm in (None, QKNorm(weight, weight, 1e-6)):
        qkv, table = torch.zeros(4, 48 * 128, dtype=BF16), torch.zeros(64, 128)
        rope_and_store_triton(qkv, table, kv[:, 1], TokenPlaces(four, four), SHAPE, norm)
    staging = torch.zeros(2, 2, 2, 2, 32, 4, 128, dtype=BF16)
    pack_triton(kv, four, staging)
    fingerprint_triton(kv.view(torch.int64).view(len(kv), -1), four)
    dequantise_kv_triton(quantise_kv_triton(kv), BF16)


def sampler() -> None:
    logits = torch.zeros(4, 128256, dtype=BF16)
    real, whole = torch.zeros(4), torch.zeros(4, dtype=torch.int64)
    counts, mask = torch.zeros(4, 128256, dtype=torch.int32), torch.zeros(4, 128256, dtype=torch.bool)
    allowed = torch.zeros(4, 128256 // 32, dtype=torch.int32)
    sample_triton(logits, SamplingTensors())
    sample_triton(logits, SamplingTensors(real, whole, whole))
    penalties = Penalties(counts, mask, real, real, real)
    bias = LogitBias(whole, whole, real)
    sample_triton(logits, SamplingTensors(real, whole, whole, whole.int(), real, real, penalties, bias, allowed))


def verification() -> None:
    probabilities, whole = torch.zeros(4, 128256), torch.zeros(4, dtype=torch.int64)
    rejection_ids_triton(probabilities, probabilities, whole, whole, whole)
    rejection_ids_triton(probabilities, None, whole, whole, whole)


def linears() -> None:
    weight = torch.zeros(256, 2048, dtype=BF16)
    norm = torch.zeros(2048, dtype=BF16)
    for rows in (1, 8):
        x = torch.zeros(rows, 2048, dtype=BF16)
        skinny_norm_linear(x, norm, 1e-5, weight)
        skinny_norm_silu_linear(x, norm, 1e-5, weight)
        skinny_linear_add(x, weight, torch.zeros(rows, 256, dtype=BF16))


def attention() -> None:
    layout = StepLayout([1, 1, 40], [30, 5, 100], [[0, 1], [1], list(range(7))], num_decodes=2)
    for num_splits in (1, 8):
        backend = TritonAttention(SHAPE, torch.device("cpu"), num_splits=num_splits)
        backend.plan(layout)
        kv = torch.zeros(8, 2, 2, 16, 8, 128, dtype=BF16)
        backend.run(torch.zeros(42, 32, 128, dtype=BF16), kv[:, 1])


if __name__ == "__main__":
    triton.runtime.driver.set_active(HopperDriver())
    elementwise()
    cache()
    sampler()
    verification()
    linears()
    attention()
