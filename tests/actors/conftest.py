from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def collected() -> Iterator[None]:
    """A worker and its parts refer to each other, and the collector does not know how large their tensors are."""
    yield
    gc.collect()
