from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.actors.messages import KVEvents
from baton.router.prefix_index import MAX_PREDICTED, PrefixIndex

CHAIN = [bytes([i]) * 16 for i in range(20)]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(clock: Clock | None = None, max_blocks: int = 100) -> PrefixIndex:
    index = PrefixIndex(predicted_s=5.0, clock=clock or Clock())
    index.add("a", max_blocks)
    index.apply("a", KVEvents(snapshot=True))
    return index


@given(st.integers(0, 20))
def test_the_match_is_the_number_of_leading_blocks(held: int) -> None:
    index = make()
    index.apply("a", KVEvents(stored=tuple(CHAIN[:held])))
    assert index.match(CHAIN, "a") == held


def test_removed_blocks_no_longer_match() -> None:
    index = make()
    index.apply("a", KVEvents(stored=tuple(CHAIN)))
    index.apply("a", KVEvents(removed=tuple(CHAIN[7:])))
    assert index.match(CHAIN, "a") == 7


def test_a_snapshot_replaces_everything() -> None:
    index = make()
    index.apply("a", KVEvents(stored=tuple(CHAIN)))
    index.apply("a", KVEvents(stored=tuple(CHAIN[:3]), snapshot=True))
    assert index.match(CHAIN, "a") == 3


def test_changes_before_a_snapshot_say_nothing() -> None:
    index = PrefixIndex()
    index.add("a", 100)
    index.apply("a", KVEvents(stored=tuple(CHAIN)))
    assert index.match(CHAIN, "a") == 0


def test_a_dropped_life_holds_nothing_and_its_late_events_are_ignored() -> None:
    index = make()
    index.apply("a", KVEvents(stored=tuple(CHAIN)))
    index.drop("a")
    index.drop("a")
    assert index.apply("a", KVEvents(stored=tuple(CHAIN)))
    index.predict("a", CHAIN)
    assert index.match(CHAIN, "a") == 0


def test_a_worker_cannot_claim_more_blocks_than_it_has() -> None:
    index = make(max_blocks=10)
    assert not index.apply("a", KVEvents(stored=tuple(CHAIN)))
    assert index.num_blocks("a") == 0
    assert index.apply("a", KVEvents(stored=tuple(CHAIN[:10]), snapshot=True))
    assert index.match(CHAIN, "a") == 10


def test_what_was_just_sent_counts_as_held_for_a_while() -> None:
    clock = Clock()
    index = make(clock)
    index.apply("a", KVEvents(stored=tuple(CHAIN[:2])))
    index.predict("a", CHAIN[:8])
    assert index.match(CHAIN, "a") == 8
    clock.now = 4.9
    assert index.match(CHAIN, "a") == 8
    clock.now = 5.0
    assert index.match(CHAIN, "a") == 2


def test_predictions_are_bounded_and_a_chain_loses_its_end_first() -> None:
    index = make()
    long_chain = [i.to_bytes(16, "big") for i in range(MAX_PREDICTED + 10)]
    index.predict("a", long_chain)
    assert index.match(long_chain, "a") == MAX_PREDICTED
