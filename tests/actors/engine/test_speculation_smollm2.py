"""A real model that repeats itself: prompt lookup changes no token, and saves steps."""

from __future__ import annotations

from typing import Literal

import pytest
from model_cases import reference_greedy, smollm2, smollm2_path, smollm2_reference

from baton.actors.build import join_engine
from baton.actors.config import WorkerConfig
from baton.actors.engine.config import EngineConfig
from baton.actors.engine.drafters.config import SpeculationConfig
from baton.actors.engine.request import Request, SamplingParams
from baton.actors.engine.weights import Placement

# "The cat sat on the mat. The dog sat on the mat." over and over, as token ids.
SENTENCE = (504, 2644, 3343, 335, 260, 6906, 30, 378, 2767, 3343, 335, 260, 6906, 30)
NUM_TOKENS = 40


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_greedy_tokens_equal_transformers_in_fewer_steps(drafter: Literal["ngram", "suffix"]) -> None:
    prompt = SENTENCE * 3
    speculation = SpeculationConfig(drafter=drafter, max_draft_tokens=5, length="fixed")
    settings = EngineConfig(num_blocks=32, max_num_seqs=4, max_step_tokens=64, speculation=speculation, max_context=512)
    config = WorkerConfig(model=str(smollm2_path()), served_name="smollm2", engine=settings)
    built = join_engine(config, smollm2(), Placement(), "1")
    sampling = SamplingParams(max_tokens=NUM_TOKENS, seed=0, temperature=0.0, ignore_eos=True)
    built.engine.submit(Request(id="a", tokens=prompt, sampling=sampling))
    tokens: list[int] = []
    num_steps = 0
    while built.engine.has_work:
        tokens += [token for update in built.engine.step() for token in update.tokens]
        num_steps += 1
    assert tokens == reference_greedy(smollm2_reference(), prompt, NUM_TOKENS)
    assert num_steps < NUM_TOKENS / 2 and sum(built.drafts.accepted) > NUM_TOKENS / 2
