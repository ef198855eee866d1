from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.actors.engine.block_hash import block_hashes, root_hash
from baton.actors.messages import KVEvents
from baton.router.prefix_index import MAX_PREDICTED, NUM_SHARDS, PrefixIndex

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
    clock.now = 4.0
    index.predict("a", CHAIN[:8])
    clock.now = 9.0
    assert index.match(CHAIN, "a") == 8
    clock.now = 14.0
    assert index.match(CHAIN, "a") == 2


def test_predictions_are_bounded() -> None:
    clock = Clock()
    index = make(clock)
    half = MAX_PREDICTED // 2
    chains = [[(n * MAX_PREDICTED + i).to_bytes(16, "little") for i in range(half)] for n in range(5)]
    for chain in chains:
        index.predict("a", chain)
    assert [index.match(chain, "a") for chain in chains] == [0, 0, half, half, half]  # the oldest went


def test_a_new_life_is_not_credited_with_what_an_earlier_one_held_or_was_sent() -> None:
    clock = Clock()
    index = make(clock)
    index.apply("a", KVEvents(stored=tuple(CHAIN[:4])))
    index.predict("a", CHAIN)
    for generation in range(5):
        index.drop(f"life {generation - 1}" if generation else "a")
        index.add(f"life {generation}", 100)
        assert index.match_all(CHAIN) == {}
        assert index.apply(f"life {generation}", KVEvents(snapshot=True))
        clock.now += 11.0
        for _ in range(2 * NUM_SHARDS):  # frames go on: the sweep gets its turns
            index.apply(f"life {generation}", KVEvents())


def test_swept_places_are_used_again() -> None:
    clock = Clock()
    index = PrefixIndex(predicted_s=5.0, clock=clock)
    for generation in range(50):
        index.add("a", 100)
        index.apply("a", KVEvents(stored=tuple(CHAIN), snapshot=True))
        clock.now += 11.0
        for _ in range(NUM_SHARDS + 1):
            index.apply("a", KVEvents())
        assert index.match(CHAIN, "a") == len(CHAIN), generation
    assert index._slots.num_slots <= 4  # pyright: ignore[reportPrivateUsage]


class Model:
    """What the index should say, in the plainest way: a set for each life."""

    def __init__(self) -> None:
        self.stored: dict[str, set[bytes]] = {}

    def match(self, chain: Sequence[bytes], life: str) -> int:
        return next((i for i, block in enumerate(chain) if block not in self.stored[life]), len(chain))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_all_matches_at_once_are_each_lifes_own(data: st.DataObject) -> None:
    """Chains that share prefixes, on lives that grow, evict leaves, send snapshots, die and come back."""
    draw = data.draw
    clock = Clock()
    index, model = PrefixIndex(clock=clock), Model()
    chains = [block_hashes([*[0] * 4 * n, *[n + 1] * (16 - 4 * n)], 1, root_hash()) for n in range(4)]
    names = [f"w{i}" for i in range(5)]
    for _ in range(draw(st.integers(1, 30))):
        name = draw(st.sampled_from(names))
        chain = draw(st.sampled_from(chains))
        action = draw(st.sampled_from(["grow", "shrink", "snapshot", "drop"]))
        clock.now += draw(st.sampled_from([0.0, 11.0]))
        if action == "drop":
            index.drop(name)
            model.stored.pop(name, None)
            continue
        if name not in model.stored:
            index.add(name, 100)
            index.apply(name, KVEvents(snapshot=True))
            model.stored[name] = set()
        held = model.match(chain, name)
        if action == "grow":
            new = tuple(chain[held : draw(st.integers(held, 16))])
            model.stored[name].update(new)
            index.apply(name, KVEvents(stored=new))
        elif action == "shrink":
            longest = {block for other in chains if other != chain for block in other[: model.match(other, name)]}
            gone = tuple(block for block in chain[:held] if block not in longest)
            model.stored[name].difference_update(gone)
            index.apply(name, KVEvents(removed=gone))
        else:
            index.apply(name, KVEvents(stored=tuple(model.stored[name]), snapshot=True))
    for chain in chains:
        expected = {name: model.match(chain, name) for name in model.stored}
        assert index.match_all(chain) == {name: num for name, num in expected.items() if num}
        assert {name: index.match(chain, name) for name in expected} == expected
        rows = index.slots(tuple(names))
        assert index.match_slots(chain)[rows].tolist() == [expected.get(name, 0) for name in names]
    for name, stored in model.stored.items():
        assert index.num_blocks(name) == len(stored)
