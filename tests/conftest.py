"""Fixtures and rules for all tests: where a device or program is missing, tests that need it are skipped by name."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton, which tests of every folder do in some order

NUM_DEVICES_NEEDED = {"gpu": 1, "multi_gpu": 2}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _skip_without_browser(items)
    needs = {
        item: max((NUM_DEVICES_NEEDED.get(mark.name, 0) for mark in item.iter_markers()), default=0) for item in items
    }
    if not any(needs.values()):
        return
    present = torch.cuda.device_count()
    for item, needed in needs.items():
        if needed > present:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA devices, found {present}"))


def _skip_without_browser(items: list[pytest.Item]) -> None:
    if shutil.which("chromium") and shutil.which("chromedriver"):
        return
    for item in items:
        if item.get_closest_marker("browser"):
            item.add_marker(pytest.mark.skip(reason="needs chromium and chromedriver"))


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    """A worker in this process may have set torch's number of threads, which is everybody's."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def shared_ray() -> Iterator[None]:
    """One local Ray for the whole session; launchers find it connected, use it and leave it running."""
    import ray

    ray.init(
        address="local",
        num_cpus=8,  # what tests may reserve, not what they use
        num_gpus=2,  # likewise: nothing touches them
        include_dashboard=False,
        namespace="baton",
        object_store_memory=80 * 2**20,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    yield
    ray.shutdown()
