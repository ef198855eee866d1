"""The runner against transformers on SmolLM2: whatever the batch looks like, each sequence gets the same tokens."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from model_cases import (
    BLOCK_SIZE,
    GREEDY,
    all_logits,
    drive,
    generate,
    kv_cache,
    make_runner,
    reference_greedy,
    reference_logits,
    scattered_blocks,
    smollm2,
    smollm2_reference,
    step,
)
from msgspec.structs import replace

from baton.actors.engine.batch import Batch, Row

NUM_TOKENS = 20
PROMPTS = (
    (504, 3575, 282, 4649, 314),  # The capital of France is
    (1, 4093, 198, 19556, 346, 11173, 597, 253, 9405, 30, 2, 198, 1, 520, 9531, 198),
    tuple(range(1000, 1075)),
)


@cache
def expected(prompt: int) -> list[int]:
    return reference_greedy(smollm2_reference(), PROMPTS[prompt], NUM_TOKENS)


@pytest.mark.parametrize("prompt", range(len(PROMPTS)))
@pytest.mark.parametrize("chunk", [BLOCK_SIZE, 1 << 20], ids=["chunks", "whole"])
def test_greedy_tokens_equal_transformers(prompt: int, chunk: int):
    [sequence] = drive([PROMPTS[prompt]], NUM_TOKENS)
    generate(make_runner(smollm2()), [sequence], NUM_TOKENS, chunk)
    assert sequence.output == expected(prompt)


def test_decodes_and_prefill_chunks_share_a_batch():
    first, second, third = drive(PROMPTS, NUM_TOKENS)
    runner = make_runner(smollm2())
    step(runner, [first], chunk=7)
    generate(runner, [first], 2)
    step(runner, [first, second], chunk=7)
    generate(runner, [first, second, third], NUM_TOKENS, chunk=7)
    for prompt, sequence in enumerate((first, second, third)):
        assert sequence.output[:NUM_TOKENS] == expected(prompt)


def test_logits_of_every_position_equal_transformers():
    tokens = PROMPTS[2]
    [blocks] = scattered_blocks(len(tokens), seed=3)
    logits = all_logits(smollm2(), [Row(0, 0, len(tokens), tokens, blocks, True)], kv_cache(smollm2()))
    torch.testing.assert_close(logits, reference_logits(smollm2_reference(), tokens), atol=1e-3, rtol=0)


def test_a_missing_id_comes_from_the_step_before():
    [sequence] = drive([PROMPTS[0]], NUM_TOKENS)
    runner = make_runner(smollm2())
    steps = [runner.launch(Batch((sequence.row(1 << 20),), (sequence.admission(),)))]
    for position in range(len(PROMPTS[0]), len(PROMPTS[0]) + 5):
        steps.append(runner.launch(Batch((Row(0, position, 1, (), sequence.blocks, True),))))
    assert [pending.wait().tokens[0][0] for pending in steps] == expected(0)[:6]


def test_a_chunk_that_samples_nothing_yields_nothing():
    [sequence] = drive([PROMPTS[2]], NUM_TOKENS)
    output = step(make_runner(smollm2()), [sequence], chunk=16)
    assert output.tokens == ((),) and output.logprobs == (None,)


def test_a_random_row_depends_on_seed_and_position_alone():
    sampling = replace(GREEDY, temperature=1.5, seed=11, top_k=200, top_p=0.95, min_p=0.01)
    [alone] = drive([PROMPTS[0]], NUM_TOKENS, sampling)
    generate(make_runner(smollm2()), [alone], 12)

    company = drive(PROMPTS, NUM_TOKENS, replace(sampling, seed=5))
    company[0].sampling = sampling
    company[0].slot, company[2].slot = 2, 0
    generate(make_runner(smollm2()), company, 12, chunk=16)
    assert company[0].output[:12] == alone.output
    assert company[1].output[:12] != alone.output


def test_a_sequence_goes_on_in_another_runner_as_if_it_had_never_moved():
    sampling = replace(
        GREEDY, temperature=0.9, seed=-7, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.7
    )
    [stayed] = drive([PROMPTS[1]], NUM_TOKENS, sampling)
    generate(make_runner(smollm2()), [stayed], NUM_TOKENS)

    [moved] = drive([PROMPTS[1]], NUM_TOKENS, sampling)
    generate(make_runner(smollm2()), [moved], 9)
    moved.slot, moved.computed, moved.is_admitted = 3, 0, False
    generate(make_runner(smollm2()), [moved], NUM_TOKENS)
    assert moved.output == stayed.output


def test_penalties_match_transformers():
    sampling = replace(GREEDY, repetition_penalty=1.4)
    [sequence] = drive([PROMPTS[1]], NUM_TOKENS, sampling)
    generate(make_runner(smollm2()), [sequence], NUM_TOKENS)
    ids = torch.tensor([PROMPTS[1]])
    reference = smollm2_reference().generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, repetition_penalty=1.4, max_new_tokens=NUM_TOKENS
    )
    assert sequence.output == reference[0, len(PROMPTS[1]) :].tolist()[:NUM_TOKENS]


def test_stop_ids_wait_for_min_tokens():
    stop = expected(0)[0]
    sampling = replace(GREEDY, stop_token_ids=(stop,), min_tokens=4, logit_bias={stop: 100.0})
    [sequence] = drive([PROMPTS[0]], NUM_TOKENS, sampling)
    generate(make_runner(smollm2()), [sequence], 6)
    assert stop not in sequence.output[:4]
    assert sequence.output[4:] == [stop, stop]


def test_ignored_eos_may_come_at_any_time():
    eos = smollm2().config.eos_ids[0]
    sampling = replace(GREEDY, min_tokens=4, logit_bias={eos: 100.0})
    held, free = drive(PROMPTS[:2], NUM_TOKENS, sampling)
    free.sampling = replace(sampling, ignore_eos=True)
    generate(make_runner(smollm2()), [held, free], 5)
    assert held.output.index(eos) == 4
    assert free.output == [eos] * 5


def test_logprobs_come_for_the_rows_that_ask():
    silent, asking, only_chosen = drive(PROMPTS, NUM_TOKENS)
    asking.sampling, only_chosen.sampling = replace(GREEDY, logprobs=3), replace(GREEDY, logprobs=0)
    step(make_runner(smollm2()), [silent, asking, only_chosen])
    log_softmax = reference_logits(smollm2_reference(), PROMPTS[1])[-1].log_softmax(dim=-1)
    best = log_softmax.topk(3)

    assert silent.logprobs == []
    [found] = asking.logprobs
    assert found.top_ids == tuple(best.indices.tolist())
    assert found.top == pytest.approx(best.values.tolist(), abs=1e-3)
    assert found.chosen == pytest.approx(best.values[0].item(), abs=1e-3)
    [found] = only_chosen.logprobs
    assert found.top_ids == () and found.chosen < 0


def test_a_slot_forgets_its_last_tenant():
    runner = make_runner(smollm2(), num_slots=1)
    [hot] = drive([PROMPTS[1]], NUM_TOKENS, replace(GREEDY, temperature=2.0, presence_penalty=2.0, logprobs=1))
    generate(runner, [hot], 5)
    [cold] = drive([PROMPTS[0]], NUM_TOKENS)
    generate(runner, [cold], NUM_TOKENS)
    assert cold.output == expected(0)
    assert cold.logprobs == []
