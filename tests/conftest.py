"""Fixtures and rules for all tests: where there are too few CUDA devices, tests that need them are skipped by name."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

NUM_DEVICES_NEEDED = {"gpu": 1, "multi_gpu": 2}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needs = {
        item: max((NUM_DEVICES_NEEDED.get(mark.name, 0) for mark in item.iter_markers()), default=0) for item in items
    }
    if not any(needs.values()):
        return
    import torch

    present = torch.cuda.device_count()
    for item, needed in needs.items():
        if needed > present:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA devices, found {present}"))


@pytest.fixture(scope="session")
def shared_ray() -> Iterator[None]:
    """One local Ray for the whole session; launchers find it connected, use it and leave it running."""
    import ray

    ray.init(
        address="local",
        num_cpus=8,  # what tests may reserve, not what they use
        include_dashboard=False,
        namespace="baton",
        object_store_memory=80 * 2**20,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    yield
    ray.shutdown()
