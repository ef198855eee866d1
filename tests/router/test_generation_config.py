from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_workers import FakeWorker
from pydantic import ValidationError

from baton.router.generation_config import SamplingDefaults, sampling_defaults
from baton.router.tokenizer import Tokenizer
from tests.router.rig import served


def test_a_folder_says_what_its_generation_config_says(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == SamplingDefaults()
    recommended = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "eos_token_id": [1, 2]}
    (tmp_path / "generation_config.json").write_text(json.dumps(recommended))
    assert sampling_defaults(tmp_path) == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)


def test_nonsense_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(ValidationError, match="top_p"):
        sampling_defaults(tmp_path)


def test_a_gguf_file_without_recommendations_leaves_all_as_it_is(smollm_path: Path) -> None:
    assert sampling_defaults(smollm_path) == SamplingDefaults()


async def test_a_request_overrides_what_it_names(tokenizer: Tokenizer) -> None:
    worker = FakeWorker()
    defaults = SamplingDefaults(temperature=0.6, top_k=20, repetition_penalty=1.1)
    async with served(tokenizer, worker, defaults=defaults) as api:
        await api.chat(max_tokens=1)
        await api.chat(max_tokens=1, temperature=0, top_k=0)
        seen = [(s.request.sampling.temperature, s.request.sampling.top_k) for s in worker.submits]
        assert seen == [(0.6, 20), (0, 0)]
        assert worker.submits[1].request.sampling.repetition_penalty == 1.1
