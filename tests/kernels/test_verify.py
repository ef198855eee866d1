from __future__ import annotations

import pytest
import torch

from baton.kernels.random_bits import gumbel
from baton.kernels.verify_chain import NO_DRAFT, REJECTED, verify_chains
from baton.kernels.verify_rejection import Chance, rejection_ids_reference, verify_by_rejection
from baton.kernels.verify_rejection_triton import rejection_ids_triton

NUM_SAMPLES = 100_000


def test_what_counts_ends_with_the_first_difference_of_each_row() -> None:
    ids = torch.tensor([5, 6, 7, 1, 2, 3, 4, 9, 8])
    drafts = torch.tensor([5, 6, NO_DRAFT, 1, 9, 3, NO_DRAFT, NO_DRAFT, NO_DRAFT])
    firsts = torch.tensor([0, 0, 0, 3, 3, 3, 3, 7, 8])
    found = verify_chains(ids, drafts, firsts)
    assert found.ids.tolist() == [5, 6, 7, 1, 2, REJECTED, REJECTED, 9, 8]
    assert found.is_last.tolist() == [False, False, True, False, True, False, False, True, True]


def distributions(num: int, vocab: int, seed: int) -> torch.Tensor:
    return torch.softmax(2 * torch.randn(num, vocab, generator=torch.Generator().manual_seed(seed)), dim=-1)


@pytest.mark.parametrize("is_certain", [False, True])
@pytest.mark.parametrize(("num", "vocab"), [(1, 7), (13, 97), (5, 5000)])
def test_triton_rejects_as_the_reference_does(num: int, vocab: int, is_certain: bool) -> None:
    target, draft = distributions(num, vocab, 1), distributions(num, vocab, 2)
    draft[::3] = target[::3]  # always accepted
    drafts = torch.multinomial(draft, 1, generator=torch.Generator().manual_seed(3))[:, 0]
    drafts[::4] = NO_DRAFT
    rows = (target, None if is_certain else draft, drafts, torch.arange(num) * 7 - 3, torch.arange(num) + 100)
    assert torch.equal(rejection_ids_triton(*rows), rejection_ids_reference(*rows))


def coupled(probabilities: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A sample of each row with the noise of its seed and position, as target and draft modules draw."""
    return (probabilities.log() + gumbel(seeds, positions, probabilities.shape[1])).argmax(dim=-1)


def chi_squared(samples: torch.Tensor, expected: torch.Tensor) -> float:
    counts = torch.bincount(samples, minlength=len(expected)).double()
    return float(((counts - len(samples) * expected) ** 2 / (len(samples) * expected)).sum())


@pytest.mark.parametrize("scheme", ["rejection", "rejection, certain drafts", "coupled"])
def test_two_drafts_a_row_keep_the_targets_distribution(scheme: str) -> None:
    """The joint distribution of the first two emitted tokens, against p(a) p(b | a), at the 0.1 % level."""
    vocab = 5
    first = distributions(1, vocab, 11)[0] * 0.9 + 0.02
    second = distributions(vocab, vocab, 12) * 0.9 + 0.02  # [a, b]
    guess = distributions(1, vocab, 13)[0]
    guesses = distributions(vocab, vocab, 14)
    n = NUM_SAMPLES
    seeds = torch.arange(n)
    at = [torch.full((n,), position) for position in (40, 41, 42)]
    draft_a = coupled(guess.expand(n, -1), seeds, at[0])
    draft_b = coupled(guesses[draft_a], seeds, at[1])
    # Each row: the target after the context, after draft a, and after draft b (which may be anything here).
    target = torch.stack((first.expand(n, -1), second[draft_a], second[draft_b]), dim=1).flatten(0, 1)
    draft = torch.stack((guess.expand(n, -1), guesses[draft_a], guesses[draft_b]), dim=1).flatten(0, 1)
    drafts = torch.stack((draft_a, draft_b, torch.full((n,), NO_DRAFT)), dim=1).flatten()
    firsts = (torch.arange(n) * 3).repeat_interleave(3)
    row_seeds, positions = seeds.repeat_interleave(3), torch.stack(at, dim=1).flatten()
    if scheme == "coupled":
        ids = verify_chains(coupled(target, row_seeds, positions), drafts, firsts).ids
    else:
        certain = None if "certain" in scheme else draft
        plain = coupled(target, row_seeds, positions)
        ids = verify_by_rejection(target, certain, drafts, firsts, Chance(row_seeds, positions, plain)).ids
    a, b = ids.view(n, 3)[:, 0], ids.view(n, 3)[:, 1]
    assert chi_squared(a, first) < 18.5  # 4 degrees of freedom
    both = b != REJECTED  # what b is given a is decided by a's own step or by the next one, which sees a
    for token in range(vocab):
        given = b[both & (a == token)]
        if len(given) > 1000:
            assert chi_squared(given, second[token]) < 18.5


def test_rejection_accepts_as_often_as_distributions_overlap() -> None:
    target, draft = distributions(1, 6, 1), distributions(1, 6, 2)
    n = NUM_SAMPLES
    seeds, positions = torch.arange(n), torch.full((n,), 9)
    drafts = coupled(draft.expand(n, -1), seeds, positions)
    ids = rejection_ids_reference(target.expand(n, -1), draft.expand(n, -1), drafts, seeds, positions)
    overlap = float(torch.minimum(target, draft).sum())
    assert float((ids == drafts).float().mean()) == pytest.approx(overlap, abs=0.006)
