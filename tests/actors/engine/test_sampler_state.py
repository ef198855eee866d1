"""Slot states: a step carries only what its rows use, and a sequence's history is rebuilt from its tokens."""

from __future__ import annotations

import pytest
import torch

from baton.actors.engine.batch import Admission, Row
from baton.actors.engine.request import Request, SamplingParams
from baton.actors.engine.sampler_state import SlotStates
from baton.kernels.sampling import SamplingTensors, sample_reference
from baton.kernels.sampling_triton import sample_triton

VOCAB = 12
EOS = 2


def states(*admissions: Admission) -> SlotStates:
    made = SlotStates(4, VOCAB, [EOS], torch.device("cpu"))
    made.admit(admissions)
    return made


def admission(slot: int, tokens: tuple[int, ...] = (5, 6), num_output: int = 0, **sampling: object) -> Admission:
    params = SamplingParams(**{"max_tokens": 9, "seed": 1, "temperature": 0.0} | sampling)  # type: ignore[arg-type]
    return Admission(slot, Request(id="r", tokens=tokens, sampling=params, num_output=num_output), tokens)


def tensors(made: SlotStates, *places: tuple[int, int]) -> SamplingTensors:
    """What a step over (slot, end) pairs samples with."""
    rows = [Row(slot, end - 1, 1, (0,), (0,), True) for slot, end in places]
    slots, ends = (torch.tensor(column) for column in zip(*places, strict=True))
    return made.tensors(rows, slots, ends)


def test_a_greedy_batch_carries_nothing():
    made = states(admission(0, top_k=3, top_p=0.5, min_p=0.1), admission(1))
    assert tensors(made, (0, 2), (1, 2)) == SamplingTensors()


def test_parameters_follow_their_row_in_any_order():
    made = states(
        admission(0, temperature=0.5, seed=-3, top_k=7), admission(3, temperature=2.0, seed=2**63 + 5, top_p=0.5)
    )
    found = tensors(made, (3, 4), (0, 9))
    assert found.temperature is not None and found.temperature.tolist() == [2.0, 0.5]
    assert found.seeds is not None and [seed % 2**64 for seed in found.seeds.tolist()] == [2**63 + 5, 2**64 - 3]
    assert found.positions is not None and found.positions.tolist() == [4, 9]
    assert found.top_k is not None and found.top_k.tolist() == [0, 7]
    assert found.top_p is not None and found.top_p.tolist() == [0.5, 1.0]
    assert found.min_p is None and found.penalties is None and found.bias is None


def test_counts_rebuilt_from_tokens_equal_counts_kept():
    kept = states(admission(1, tokens=(5, 6, 5), presence_penalty=1.0))
    for token in (7, 5, 7):
        kept.record(torch.tensor([1]), torch.tensor([token]))
    rebuilt = states(admission(1, tokens=(5, 6, 5, 7, 5, 7), num_output=3, presence_penalty=1.0))
    for made in (kept, rebuilt):
        penalties = tensors(made, (1, 6)).penalties
        assert penalties is not None
        assert penalties.output_counts.tolist() == [[0, 0, 0, 0, 0, 1, 0, 2, 0, 0, 0, 0]]


def test_the_prompt_counts_for_repetition_alone():
    made = states(
        admission(0, presence_penalty=1.0), admission(1, tokens=(5, 6, 7), num_output=1, repetition_penalty=1.2)
    )
    only_presence, both = tensors(made, (0, 2)).penalties, tensors(made, (0, 2), (1, 3)).penalties
    assert only_presence is not None and only_presence.prompt_mask is None
    assert both is not None and both.prompt_mask is not None
    assert both.prompt_mask[1].nonzero().flatten().tolist() == [5, 6]


def test_a_new_tenant_inherits_no_history():
    made = states(admission(0, tokens=(5, 6, 7), num_output=2, presence_penalty=1.0))
    made.admit([admission(0, tokens=(8,), repetition_penalty=1.5)])
    penalties = tensors(made, (0, 1)).penalties
    assert penalties is not None and penalties.prompt_mask is not None
    assert penalties.output_counts.sum() == 0
    assert penalties.prompt_mask[0].nonzero().flatten().tolist() == [8]


@pytest.mark.parametrize(("ignore_eos", "banned"), [(False, {9, EOS}), (True, {9})])
def test_stop_ids_are_banned_until_min_tokens(ignore_eos: bool, banned: set[int]):
    made = states(admission(0, min_tokens=2, stop_token_ids=(9,), ignore_eos=ignore_eos, logit_bias={4: 1.5}))
    early, late = tensors(made, (0, 3)).bias, tensors(made, (0, 4)).bias
    assert early is not None and late is not None
    values = dict(zip(early.ids.tolist(), early.values.tolist(), strict=True))
    assert values == {4: 1.5} | {token: float("-inf") for token in banned}
    assert late.ids.tolist() == [4]


def test_triton_samples_from_what_slots_hand_it_as_the_reference_does():
    """Each row with parameters of its own: none may be read from another's place."""
    asked = ({"temperature": 0.8, "top_k": 5}, {}, {"temperature": 1.5, "top_p": 0.6, "min_p": 0.1, "seed": 9}, {
        "repetition_penalty": 1.7, "frequency_penalty": 0.4, "presence_penalty": 0.3})  # fmt: skip
    made = states(*(admission(slot, tokens=(5, 6, 7), num_output=1, **one) for slot, one in enumerate(asked)))
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    for position in range(3, 40):
        params = tensors(made, (3, position), (0, position), (2, position), (1, position))
        assert torch.equal(sample_triton(logits, params).ids, sample_reference(logits, params).ids)
