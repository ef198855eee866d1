"""The head that comes with Baton, on the model that it was trained for."""

from __future__ import annotations

from model_cases import reference_greedy, smollm2, smollm2_path, smollm2_reference

from baton.actors.build import join_engine
from baton.actors.config import WorkerConfig
from baton.actors.engine.config import EngineConfig
from baton.actors.engine.drafters.config import SpeculationConfig
from baton.actors.engine.request import Request, SamplingParams
from baton.actors.engine.weights import Placement
from baton.router.tokenizer import Tokenizer

NUM_TOKENS = 40
QUESTION = "A farmer has 3 fields with 24 apple trees each. Each tree gives 15 apples. How many apples are there?"


def test_it_changes_no_token_and_saves_steps() -> None:
    speculation = SpeculationConfig(
        drafter="eagle", model="baton:smollm2-135m-instruct-eagle3", max_draft_tokens=3, length="fixed"
    )
    settings = EngineConfig(num_blocks=32, max_num_seqs=4, max_step_tokens=64, speculation=speculation, max_context=512)
    config = WorkerConfig(model=str(smollm2_path()), served_name="smollm2", engine=settings)
    built = join_engine(config, smollm2(), Placement(), "1")
    prompt = Tokenizer.load(smollm2_path()).encode_chat_now([{"role": "user", "content": QUESTION}])
    sampling = SamplingParams(max_tokens=NUM_TOKENS, seed=0, temperature=0.0, ignore_eos=True)
    built.engine.submit(Request(id="a", tokens=prompt, sampling=sampling))
    tokens: list[int] = []
    num_steps = 0
    while built.engine.has_work:
        tokens += [token for update in built.engine.step() for token in update.tokens]
        num_steps += 1
    assert tokens == reference_greedy(smollm2_reference(), prompt, NUM_TOKENS)
    assert num_steps < NUM_TOKENS * 0.85 and sum(built.drafts.accepted) >= NUM_TOKENS * 0.15
