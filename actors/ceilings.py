"""What the device can do at best, measured in a moment at the start: utilisation is a share of this.

Measured, for a table of products would not know this machine, its clocks, nor a CPU's share that we may use.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

TRIES = 3


@dataclass(frozen=True, slots=True)
class Ceilings:
    flops_per_s: float
    bytes_per_s: float


@torch.inference_mode()
def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Take the best of a few matrix products and copies; a few milliseconds on a GPU, a tenth of a second on a CPU."""
    ceilings = Ceilings(_flops_per_s(device, dtype), _bytes_per_s(device))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return ceilings


def _flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    side = 8192 if device.type == "cuda" else 768
    matrix = torch.ones(side, side, device=device, dtype=dtype)
    out = torch.empty_like(matrix)
    return 2 * side**3 / _best_s(lambda: torch.mm(matrix, matrix, out=out), device)


def _bytes_per_s(device: torch.device) -> float:
    data = torch.empty(1 << (28 if device.type == "cuda" else 25), device=device, dtype=torch.uint8)
    target = torch.empty_like(data)
    return 2 * data.numel() / _best_s(lambda: target.copy_(data), device)


def _best_s(work: Callable[[], object], device: torch.device) -> float:
    times: list[float] = []
    for _ in range(TRIES + 1):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])  # the first one may still load a kernel
