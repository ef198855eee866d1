"""What lookup drafters propose, and that a step's work does not grow with the text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, overload

import pytest

from baton.actors.engine.drafters import suffix, token_index
from baton.actors.engine.drafters.drafter import Drafter
from baton.actors.engine.drafters.ngram import NgramDrafter
from baton.actors.engine.drafters.suffix import SuffixDrafter
from baton.actors.engine.sequence import Rank, Sequence
from baton.actors.engine.stopping import StopRules
from tests.actors.engine.rig import make_request


def sequence(*prompt: int, output: tuple[int, ...] = (), salt: str = "") -> Sequence:
    request = make_request("a", prompt, cache_salt=salt)
    made = Sequence(request, Rank(0, 1), StopRules.of(request, frozenset(), 1000))
    made.tokens += output
    return made


both = pytest.mark.parametrize("drafter", [NgramDrafter(2), SuffixDrafter(2)], ids=["ngram", "suffix"])


@both
def test_the_text_goes_on_as_it_did_before(drafter: Drafter) -> None:
    seq = sequence(1, 2, 3, 4, 5, 6, 7, 1, 2)
    assert list(drafter.propose(seq, 3)) == [3, 4, 5]
    seq.tokens += (3, 9)
    assert list(drafter.propose(seq, 3)) == []
    seq.tokens += (5, 6)
    assert list(drafter.propose(seq, 2)) == [7, 1]


@both
def test_a_text_without_repetition_has_no_drafts(drafter: Drafter) -> None:
    assert list(drafter.propose(sequence(*range(50)), 4)) == []
    assert list(drafter.propose(sequence(3), 4)) == []


@both
def test_the_longer_match_wins_over_the_later_one(drafter: Drafter) -> None:
    seq = sequence(4, 5, 6, 7, 8, 80, 7, 8, 81, 1, 4, 5, 6, 7, 8)
    assert list(drafter.propose(seq, 1)) == [80]


def test_a_loop_is_drafted_round_and_round() -> None:
    assert list(NgramDrafter(2).propose(sequence(7, 8, 9, 7, 8, 9, 7, 8), 7)) == [9, 7, 8, 9, 7, 8, 9]


def test_suffix_follows_the_majority_and_stops_where_it_splits() -> None:
    prompt = (1, 2, 3, 10, 0, 1, 2, 3, 11, 0, 1, 2, 3, 12, 0, 1, 2, 4, 0, 1, 2)
    assert list(SuffixDrafter(2).propose(sequence(*prompt), 5)) == [3]


def test_suffix_learns_from_ended_answers_of_the_same_salt_only() -> None:
    drafter = SuffixDrafter(2)
    drafter.forget(sequence(1, output=(20, 21, 22, 23, 24), salt="tenant"))
    assert list(drafter.propose(sequence(9, 20, 21, salt="tenant"), 9)) == [22, 23, 24]
    assert list(drafter.propose(sequence(9, 20, 21, salt="other"), 9)) == []


def test_what_suffix_keeps_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "CORPUS_TOKENS", 100)
    monkeypatch.setattr(suffix, "MAX_CORPORA", 3)
    drafter = SuffixDrafter(2)
    for i in range(50):
        seq = sequence(1, output=tuple(range(i, i + 40)), salt=f"s{i % 5}")
        drafter.propose(seq, 2)
        drafter.forget(seq)
    assert not drafter._indices
    assert len(drafter._corpora) == 3 and all(len(corpus.text) <= 101 for corpus in drafter._corpora.values())


class Watched(list[int]):
    """Counts the tokens that are read of it."""

    num_read = 0

    @overload
    def __getitem__(self, index: Any) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.num_read += len(found) if isinstance(found, list) else 1
        return found

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("the whole text is read")


@both
def test_a_step_reads_as_much_of_a_long_text_as_of_a_short_one(drafter: Drafter) -> None:
    reads: list[int] = []
    for length in (500, 20_000):
        seq = sequence(1)
        watched = Watched([i * i % 37 for i in range(length)])
        seq.tokens = watched
        for _ in range(-(-length // token_index.MOST_AT_ONCE)):
            drafter.propose(seq, 4)
        before = watched.num_read
        for token in (5, 6, 7):
            seq.tokens.append(token)
            drafter.propose(seq, 4)
        reads.append(watched.num_read - before)
        drafter.forget(seq)
    assert reads[1] <= 1.5 * reads[0] + 50


def test_a_long_prompt_is_entered_over_some_steps() -> None:
    drafter = NgramDrafter(2)
    seq = sequence(*[1, 2, 3, 4] * (token_index.MOST_AT_ONCE // 2))
    assert list(drafter.propose(seq, 2)) == []
    assert list(drafter.propose(seq, 2)) == [1, 2]
