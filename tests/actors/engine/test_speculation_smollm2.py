"""Drafts for a real model: they change no token, and save steps."""

from __future__ import annotations

import json
from typing import Literal

import pytest
from model_cases import reference_greedy, smollm2, smollm2_path, smollm2_reference
from smollm2_prompts import QUESTION, RIDDLE, SENTENCE

from baton.actors.build import join_engine
from baton.actors.config import WorkerConfig
from baton.actors.engine.config import EngineConfig
from baton.actors.engine.drafters.config import SpeculationConfig
from baton.actors.engine.request import Request, SamplingParams
from baton.actors.engine.weights import Placement

NUM_TOKENS = 40


def check(speculation: SpeculationConfig, prompt: tuple[int, ...], *, least_kept: float) -> None:
    """Generate the tokens that transformers does, of which at least the share `least_kept` were drafts."""
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
    assert num_steps <= NUM_TOKENS * (1 - least_kept) and sum(built.drafts.accepted) >= NUM_TOKENS * least_kept


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_prompt_lookup_changes_no_token_and_saves_steps(drafter: Literal["ngram", "suffix"]) -> None:
    check(SpeculationConfig(drafter=drafter, max_draft_tokens=5, length="fixed"), SENTENCE * 3, least_kept=0.5)


def test_the_head_that_comes_with_baton_changes_no_token_and_saves_steps() -> None:
    head = "baton:smollm2-135m-instruct-eagle3"
    speculation = SpeculationConfig(drafter="eagle", model=head, max_draft_tokens=3, length="fixed")
    check(speculation, RIDDLE, least_kept=0.15)


SCHEMA = {
    "type": "object",
    "properties": {
        "capital_of_the_country": {"type": "string", "maxLength": 12},
        "number_of_inhabitants": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
        "continent": {"enum": ["Europe", "South America"]},
    },
    "required": ["capital_of_the_country", "number_of_inhabitants", "continent"],
    "additionalProperties": False,
}


def test_what_a_grammar_forces_is_not_waited_for_and_changes_no_token() -> None:
    format = {"type": "json_schema", "json_schema": SCHEMA, "max_whitespace_cnt": 4}
    grammar = json.dumps({"type": "structural_tag", "format": format})
    sampling = SamplingParams(max_tokens=100, seed=5, temperature=0.8)
    outputs: list[list[int]] = []
    steps: list[int] = []
    for speculation in (None, SpeculationConfig(drafter="grammar", max_draft_tokens=8, length="fixed")):
        settings = EngineConfig(
            num_blocks=32, max_num_seqs=4, max_step_tokens=64, speculation=speculation, max_context=512
        )
        config = WorkerConfig(model=str(smollm2_path()), served_name="smollm2", engine=settings)
        engine = join_engine(config, smollm2(), Placement(), "1").engine
        engine.submit(Request(id="a", tokens=QUESTION, sampling=sampling, grammar=grammar))
        outputs.append([])
        steps.append(0)
        while engine.has_work:
            outputs[-1] += [token for update in engine.step() for token in update.tokens]
            steps[-1] += 1
    assert outputs[0] == outputs[1] and len(outputs[0]) > 20
    assert steps[1] < 0.7 * steps[0]
