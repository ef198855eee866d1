"""Every Triton kernel is tested where this machine can run it: compiled on a GPU, else in Triton's interpreter.

`-m gpu` selects the compiled runs.
"""

from __future__ import annotations

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()

# FlashInfer has no interpreter and is not installed where there is no GPU.
collect_ignore = [] if HAS_CUDA else ["test_attention_flashinfer.py"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only a GPU can run; it is no part of the suite of a machine without one."""
    if not HAS_CUDA:
        gpu_items = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=gpu_items)
        items[:] = [item for item in items if item not in gpu_items]


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu)] if HAS_CUDA else ["cpu"])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)
