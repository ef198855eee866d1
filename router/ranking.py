"""Which of a prompt's choices are returned: scorers, under the names that `rank_by` takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    answer: str  # without thoughts
    mean_logprob: float  # of its tokens


Scorer = Callable[[Sequence[Candidate]], Sequence[tuple[float, ...]]]  # the larger, the better


def by_mean_logprob(candidates: Sequence[Candidate]) -> Sequence[tuple[float, ...]]:
    return [(candidate.mean_logprob,) for candidate in candidates]


def by_votes(candidates: Sequence[Candidate]) -> Sequence[tuple[float, ...]]:
    """Self-consistency (Wang et al., 2022): the answer that most give, of those the likeliest."""
    votes = Counter(candidate.answer.strip() for candidate in candidates)
    return [(votes[candidate.answer.strip()], candidate.mean_logprob) for candidate in candidates]


SCORERS: Mapping[str, Scorer] = {"mean_logprob": by_mean_logprob, "votes": by_votes}


def ranked(candidates: Sequence[Candidate], scorer: Scorer) -> list[int]:
    """Return their indices, best first."""
    scores = scorer(candidates)
    return sorted(range(len(candidates)), key=lambda i: scores[i], reverse=True)
