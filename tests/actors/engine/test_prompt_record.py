"""What is told about a prompt: complete and in order whatever the chunks, the cache, preemption or migration do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from model_cases import GREEDY, drive, load_reference, make_runner, reference_logits, smollm2, smollm2_path

from baton.actors.engine.batch import Admission, Batch
from baton.actors.engine.prompt_record import PromptPart, PromptRecord
from baton.actors.engine.request import PromptOutput, PromptParams, Request, TokenLogprobs
from baton.actors.engine.updates import Update
from tests.actors.engine.rig import Rig, make_request

SCORES, MEAN, LAST = PromptParams(logprobs=0), PromptParams(pooling="mean"), PromptParams(pooling="last")


def told(updates: list[Update], request_id: str) -> PromptOutput:
    """The one output about the prompt; it comes with the first token."""
    first = next(update for update in updates if update.request_id == request_id and update.tokens)
    outputs = [update.prompt for update in updates if update.request_id == request_id and update.prompt]
    assert outputs == [first.prompt]
    return outputs[0]


def scores(output: PromptOutput) -> list[float]:
    return [entry.chosen for entry in output.logprobs]


@pytest.mark.parametrize("is_wired", [False, True])
@pytest.mark.parametrize("prompt_len", [1, 2, 7, 8, 9, 40])
def test_every_token_but_the_first_is_scored_once_in_order(prompt_len: int, is_wired: bool) -> None:
    rig = Rig(config={"max_num_seqs": 4, "max_step_tokens": 16, "max_prefill_chunk": 8}, is_wired=is_wired)
    warm, asked, other = (make_request(id, prompt_len, **more) for id, more in
                          (("warm", {}), ("asked", {"asked": SCORES}), ("other", {})))  # fmt: skip
    rig.submit(warm)
    rig.run()
    rig.submit(asked)
    rig.submit(other)
    updates = rig.run()
    assert scores(told(updates, "asked")) == [-float(token) for token in asked.tokens[1:]]
    assert not any(update.prompt for update in updates if update.request_id == "other")
    rig.check_idle()


def test_a_whole_prompt_is_computed_though_it_is_cached_and_the_cache_keeps_it() -> None:
    rig = Rig()
    for id, params in (("first", None), ("asked", MEAN), ("last", None)):
        rig.submit(make_request(id, 40, asked=params))
        rig.run()
    assert [rig.finished[id].cached_tokens for id in ("first", "asked", "last")] == [0, 0, 36]
    rig.check_idle()


def test_the_last_state_needs_no_more_than_the_cache_leaves() -> None:
    rig = Rig()
    for id in ("first", "again"):
        rig.submit(make_request(id, 40, asked=LAST))
        rig.run()
    assert rig.finished["again"].cached_tokens == 36


def test_preemption_repeats_nothing_and_loses_nothing() -> None:
    rig = Rig(num_blocks=16, config={"max_num_seqs": 4, "max_step_tokens": 8, "headroom_blocks": 0})
    requests = [make_request(f"r{i}", 22, asked=params, max_tokens=14) for i, params in enumerate((SCORES, MEAN) * 2)]
    for request in requests:
        rig.submit(request)
    updates = rig.run()
    assert max(rig.num_starts(request.id) for request in requests) > 1
    for request in requests:
        output = told(updates, request.id)
        if request.prompt == SCORES:
            assert scores(output) == [-float(token) for token in request.tokens[1:]]
        else:
            assert np.frombuffer(output.pooled, "<f4").tolist() == pytest.approx([sum(request.tokens) / 22, 1])
    rig.check_idle()


def test_a_migrated_request_is_not_told_again() -> None:
    rig = Rig()
    rig.submit(make_request("moved", 20, num_output=3, asked=SCORES))
    assert not any(update.prompt for update in rig.run())


def test_chunks_that_come_again_replace_what_they_said() -> None:
    record = PromptRecord(PromptParams(logprobs=0, pooling="mean"), 4)
    one, two = (np.array([value], dtype="<f4").tobytes() for value in (1.0, 2.0))
    first = PromptPart(start=0, logprobs=(TokenLogprobs(-1.0), TokenLogprobs(-2.0)), pooled=one)
    last = PromptPart(start=2, logprobs=(TokenLogprobs(-3.0),), pooled=two)
    for part in (first, last, first, last):
        record.take(part)
    output = record.output()
    assert scores(output) == [-1, -2, -3] and np.frombuffer(output.pooled, "<f4").tolist() == [0.75]


@pytest.fixture(scope="module")
def reference() -> Any:
    return load_reference(smollm2_path())


def run_chunks(prompts: list[tuple[int, ...]], params: PromptParams, chunk: int) -> list[PromptOutput]:
    """Compute each prompt in chunks on the real runner, all prompts in each batch."""
    runner = make_runner(smollm2())
    sequences = drive(prompts, 1)
    records = [PromptRecord(params, len(prompt)) for prompt in prompts]
    requests = [Request(id="r", tokens=prompt, sampling=GREEDY, prompt=params) for prompt in prompts]
    admissions = tuple(Admission(s.slot, r, r.tokens) for s, r in zip(sequences, requests, strict=True))
    while left := [s for s in sequences if s.computed < s.prompt_len]:
        rows = tuple(sequence.row(chunk) for sequence in left)
        output = runner.launch(Batch(rows, admissions)).wait()
        admissions = ()
        for index, sequence in enumerate(left):
            sequence.computed = rows[index].end
            records[sequences.index(sequence)].take(output.prompts[index])
    return [record.output() for record in records]


PROMPTS = [(504, 3575, 282, 4649, 314), tuple(range(1000, 1075))]


@pytest.mark.parametrize("chunk", [7, 1 << 20])
def test_scores_equal_transformers(reference: Any, chunk: int) -> None:
    for prompt, output in zip(PROMPTS, run_chunks(PROMPTS, PromptParams(logprobs=3), chunk), strict=True):
        expected = reference_logits(reference, prompt)[:-1].log_softmax(dim=-1)
        chosen = expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert scores(output) == pytest.approx(chosen.tolist(), abs=1e-3)
        assert [entry.top_ids for entry in output.logprobs] == list(map(tuple, expected.topk(3).indices.tolist()))


@pytest.mark.parametrize("pooling", ["mean", "last"])
@torch.inference_mode()
def test_pooled_states_equal_transformers(reference: Any, pooling: Any) -> None:
    for prompt, output in zip(PROMPTS, run_chunks(PROMPTS, PromptParams(pooling=pooling), 16), strict=True):
        states = reference.model(torch.tensor([prompt])).last_hidden_state[0]
        expected = states.mean(dim=0) if pooling == "mean" else states[-1]
        torch.testing.assert_close(
            torch.from_numpy(np.frombuffer(output.pooled, "<f4").copy()), expected, atol=1e-3, rtol=1e-3
        )
