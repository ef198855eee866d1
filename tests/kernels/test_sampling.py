from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from baton.kernels.random_bits import gumbel
from baton.kernels.sampling import (
    LogitBias,
    Penalties,
    SamplingTensors,
    sample,
    sample_reference,
    token_logprobs,
)
from baton.kernels.sampling_triton import sample_triton

INF = float("inf")
NUM_DRAWS = 20_000


def rows(num_rows: int, first_position: int = 0, /, **values: float) -> SamplingTensors:
    """Parameters equal in all rows, each row at its own position."""
    tensors: dict[str, Any] = {
        name: torch.full((num_rows,), value, dtype=torch.int32 if name == "top_k" else torch.float32)
        for name, value in {"temperature": 1.0, **values}.items()
    }
    positions = torch.arange(first_position, first_position + num_rows)
    return SamplingTensors(seeds=torch.full((num_rows,), 1234), positions=positions, **tensors)


def packed(allowed: torch.Tensor) -> torch.Tensor:
    """The mask's bits, 32 a word: [num_rows, ceil(vocab / 32)] int32."""
    bits = np.packbits(allowed.numpy(), axis=1, bitorder="little")
    padded = np.pad(bits, ((0, 0), (0, -bits.shape[1] % 4)))
    return torch.from_numpy(padded.view(np.int32).copy())


def drawn(logits: list[float], **values: float) -> torch.Tensor:
    """Relative frequencies of the tokens in NUM_DRAWS samples."""
    ids = sample(torch.tensor(logits).expand(NUM_DRAWS, -1), rows(NUM_DRAWS, **values)).ids
    return torch.bincount(ids, minlength=len(logits)) / NUM_DRAWS


def chi_squared(frequencies: torch.Tensor, probabilities: torch.Tensor) -> float:
    return float(NUM_DRAWS * ((frequencies - probabilities).square() / probabilities).sum())


# 99.99th percentile of chi-squared with 7 degrees of freedom: the draws are fixed, so this never flickers.
CHI_SQUARED_7 = 29.88


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = [0.1, -1.0, 2.0, 0.7, -0.3, 1.5, 0.0, -2.0]
    expected = (torch.tensor(logits) / temperature).softmax(0)
    assert chi_squared(drawn(logits, temperature=temperature), expected) < CHI_SQUARED_7


def test_draws_differ_between_seeds_and_between_positions() -> None:
    logits = torch.zeros(1, 1000)
    ids = [
        int(sample(logits, dataclasses.replace(rows(1, position), seeds=torch.tensor([seed]))).ids)
        for seed in range(8)
        for position in range(8)
    ]
    assert len(set(ids)) > 55  # 64 draws of 1000 ids: about 62 distinct


def test_neighbouring_positions_and_tokens_are_uncorrelated() -> None:
    noise = gumbel(torch.full((400,), 7), torch.arange(400), 500)
    assert abs(float(torch.corrcoef(torch.stack((noise[1:].flatten(), noise[:-1].flatten())))[0, 1])) < 0.01
    assert abs(float(torch.corrcoef(torch.stack((noise[:, 1:].flatten(), noise[:, :-1].flatten())))[0, 1])) < 0.01
    assert abs(float(noise.mean()) - 0.5772) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.02


def test_a_row_samples_the_same_in_any_batch() -> None:
    logits = torch.randn(6, 300)
    params = rows(6, temperature=0.9, top_p=0.8)
    together = sample(logits, params).ids
    for row in range(6):
        alone = rows(1, row, temperature=0.9, top_p=0.8)
        assert sample(logits[row : row + 1], alone).ids[0] == together[row]


def test_without_a_temperature_the_lowest_of_the_best_ids_wins() -> None:
    assert sample(torch.tensor([[1.0, 3.0, 3.0], [5.0, 5.0, 0.0]]), SamplingTensors()).ids.tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-40])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = torch.randn(50, 200) * 10
    ids = sample(logits, rows(50, temperature=temperature, top_k=5, top_p=0.9, min_p=0.1)).ids
    assert torch.equal(ids, logits.argmax(dim=1))


def test_hot_and_greedy_rows_share_a_batch() -> None:
    logits = torch.zeros(200, 50)
    logits[:, 7] = 0.01
    params = rows(200)
    params = dataclasses.replace(params, temperature=torch.tensor([0.0, 1.0]).repeat(100))
    ids = sample(logits, params).ids
    assert (ids[::2] == 7).all()
    assert len(set(ids[1::2].tolist())) > 30


def test_top_k_keeps_the_k_best_and_0_is_off() -> None:
    logits = [0.0, 1.0, 2.0, 3.0]
    assert (drawn(logits, top_k=2) > 0).tolist() == [False, False, True, True]
    for off in (0, 4, 1000):
        assert (drawn(logits, top_k=off) > 0).all()


def test_top_p_keeps_the_fewest_best_that_reach_p() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert (drawn(logits, top_p=0.75) > 0).tolist() == [True, True, False, False]
    assert (drawn(logits, top_p=0.85) > 0).tolist() == [True, True, True, False]
    assert (drawn(logits, top_p=0.0) > 0).tolist() == [True, False, False, False]
    assert (drawn(logits, top_p=1.0) > 0).all()


def test_top_p_counts_what_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    # Of the two best, 4/7 and 3/7: the first alone reaches 0.5. Of all four it does not.
    assert (drawn(logits, top_k=2, top_p=0.5) > 0).tolist() == [True, False, False, False]
    assert (drawn(logits, top_p=0.5) > 0).tolist() == [True, True, False, False]


def test_min_p_is_relative_to_the_best() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert (drawn(logits, min_p=0.25) > 0).tolist() == [True, True, True, False]


def test_filters_see_the_tempered_distribution() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert (drawn(logits, temperature=3.0, min_p=0.25) > 0).all()


def test_top_p_of_a_flat_row_reaches_past_the_sorted_head() -> None:
    logits = torch.linspace(0, 0.01, 6000)
    ids = sample(logits.expand(3000, -1), rows(3000, top_p=0.9)).ids
    assert int(ids.min()) in range(590, 640)  # the lowest tenth is cut, and little more


def test_penalties_follow_their_definitions() -> None:
    logits = torch.tensor([[2.0, -1.0, 1.2, 0.9]])
    counts = torch.tensor([[3, 0, 0, 1]], dtype=torch.int32)
    prompt = torch.tensor([[False, True, False, False]])
    one = torch.ones(1)

    def best(**penalties: torch.Tensor) -> int:
        return int(sample(logits, SamplingTensors(penalties=Penalties(counts, prompt, **penalties))).ids)

    assert best(repetition=one * 1.5) == 0  # 2 / 1.5 = 1.33 is still the best
    assert best(repetition=one * 2.0) == 2
    assert best(presence=one * 0.5) == 0
    assert best(presence=one * 1.0) == 2
    assert best(frequency=one * 0.25) == 0  # 2 - 3 * 0.25
    assert best(frequency=one * 0.3) == 2


def test_repetition_pushes_negative_logits_down() -> None:
    logits = torch.tensor([[-1.0, -1.5]])
    penalties = Penalties(torch.tensor([[1, 0]], dtype=torch.int32), None, repetition=torch.tensor([2.0]))
    assert sample(logits, SamplingTensors(penalties=penalties)).ids.tolist() == [1]


def test_bias_adds_and_bans() -> None:
    bias = LogitBias(torch.tensor([0, 1]), torch.tensor([2, 0]), torch.tensor([5.0, -INF]))
    logits = torch.tensor([[1.0, 2.0, 0.0], [3.0, 2.0, 0.0]])
    assert sample(logits, SamplingTensors(bias=bias)).ids.tolist() == [2, 1]
    assert logits[0, 2] == 0  # the model's logits stay as they are


def test_only_allowed_ids_are_drawn() -> None:
    params = dataclasses.replace(rows(100), allowed=packed(torch.tensor([[True, False, True]]).expand(100, -1)))
    ids = sample(torch.tensor([[0.0, 9.0, 0.0]]).expand(100, -1), params).ids
    assert set(ids.tolist()) == {0, 2}


def test_logprobs_are_the_models_own() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [3.0, 1.0, 2.0]])
    result = token_logprobs(logits, torch.tensor([1, 0]), num_top=2)
    expected = logits.log_softmax(-1)
    torch.testing.assert_close(result.chosen, torch.stack((expected[0, 1], expected[1, 0])))
    assert result.top_ids.tolist() == [[2, 1], [0, 2]]
    torch.testing.assert_close(result.top, expected.gather(1, result.top_ids))


# The fused sampler.


def on(device: torch.device, params: SamplingTensors) -> SamplingTensors:
    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(device)
        if isinstance(value, LogitBias):
            return LogitBias(*(tensor.to(device) for tensor in value))
        if isinstance(value, Penalties):
            return Penalties(**{f.name: move(getattr(value, f.name)) for f in dataclasses.fields(value)})
        return value

    return SamplingTensors(**{f.name: move(getattr(params, f.name)) for f in dataclasses.fields(params)})


FILTERS: list[dict[str, float]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 1e-6},
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 2999},
    {"top_k": 100_000},
    {"top_p": 0.0},
    {"top_p": 0.3},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"top_k": 3, "top_p": 0.7},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
]


@pytest.mark.parametrize("values", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", [37, 3000])
def test_triton_draws_what_the_reference_draws(vocab: int, values: dict[str, float], device: torch.device) -> None:
    logits = (torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab)) * 3).to(device)
    params = on(device, rows(4, **values))
    assert torch.equal(sample_triton(logits, params).ids, sample_reference(logits, params).ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_greedy_takes_the_lowest_of_the_best(dtype: torch.dtype, device: torch.device) -> None:
    logits = torch.zeros(3, 2500, dtype=dtype, device=device)
    logits[0, 2200] = logits[0, 1100] = 1
    logits[2, 2499] = 1
    assert sample_triton(logits, SamplingTensors()).ids.tolist() == [1100, 0, 2499]


def test_triton_keeps_ties_at_the_threshold_as_the_reference_does(device: torch.device) -> None:
    logits = torch.randint(-4, 4, (8, 64), generator=torch.Generator().manual_seed(1)).float().to(device)
    params = on(device, rows(8, top_k=5, top_p=0.6))
    assert torch.equal(sample_triton(logits, params).ids, sample_reference(logits, params).ids)


def test_triton_searches_the_whole_row_when_candidates_do_not_suffice(device: torch.device) -> None:
    logits = torch.linspace(0, 0.01, 9000, device=device).expand(2, -1)
    params = on(device, rows(2, top_p=0.9))
    assert torch.equal(sample_triton(logits, params).ids, sample_reference(logits, params).ids)


def test_triton_adjusts_as_the_reference_does(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(2)
    num_rows, vocab = 8, 1500
    logits = torch.randn(num_rows, vocab, generator=generator).to(device)
    penalties = Penalties(
        output_counts=torch.randint(0, 3, (num_rows, vocab), generator=generator, dtype=torch.int32),
        prompt_mask=torch.rand(num_rows, vocab, generator=generator) < 0.3,
        repetition=torch.full((num_rows,), 1.3),
        presence=torch.full((num_rows,), 0.2),
        frequency=torch.full((num_rows,), 0.1),
    )
    bias = LogitBias(torch.tensor([0, 3, 3]), torch.tensor([1499, 7, 8]), torch.tensor([20.0, -INF, 9.0]))
    allowed = torch.rand(num_rows, vocab, generator=generator) < 0.5
    allowed[:, [1499, 8]] = True
    for temperature in (None, 0.8):
        params = SamplingTensors(penalties=penalties, bias=bias, allowed=packed(allowed))
        if temperature is not None:
            params = dataclasses.replace(
                rows(num_rows, temperature=temperature), penalties=penalties, bias=bias, allowed=packed(allowed)
            )
        params = on(device, params)
        ids = sample_triton(logits, params).ids
        assert ids[0] == 1499
        assert torch.equal(ids, sample_reference(logits, params).ids)
