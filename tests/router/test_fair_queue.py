from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.router.fair_queue import MAX_DEBTORS, QUANTUM, FairQueue


@dataclass(eq=False)
class Item:
    num_tokens: int
    key: str = ""
    priority: int = 0
    is_waiting: bool = False


def pushed(*items: Item) -> FairQueue:
    queue = FairQueue()
    for item in items:
        queue.push(item)
    return queue


def take(queue: FairQueue) -> Item:
    item = queue.head()
    assert isinstance(item, Item)
    queue.take(item)
    return item


def test_equals_go_in_the_order_in_which_they_came() -> None:
    items = [Item(10) for _ in range(5)]
    queue = pushed(*items)
    assert [take(queue) for _ in items] == items
    assert queue.head() is None


def test_a_better_priority_goes_first() -> None:
    late, early = Item(10, priority=1), Item(10, priority=-1)
    assert take(pushed(late, early)) is early


def test_a_long_prompt_lets_short_ones_pass_and_is_not_passed_for_ever() -> None:
    long = Item(20_000)
    queue = pushed(long)
    order: list[Item] = []
    for _ in range(200):  # two short ones come for each that goes
        queue.push(Item(200))
        queue.push(Item(200))
        order.append(take(queue))
    position = order.index(long)
    assert 0 < position <= 20_000 // 200
    assert all(item.num_tokens == 200 for item in order[:position])


def test_keys_share_by_tokens_whatever_the_size_and_number_of_their_requests() -> None:
    many = [Item(100, "many") for _ in range(1000)]
    queue = pushed(*many, *(Item(8000, "long") for _ in range(20)), *(Item(1000, "middle") for _ in range(100)))
    used: dict[str, int] = {}
    while sum(used.values()) < 150_000:
        item = take(queue)
        used[item.key] = used.get(item.key, 0) + item.num_tokens
    assert max(used.values()) - min(used.values()) <= 8000 + QUANTUM


def test_what_a_keys_requests_generate_counts_too() -> None:
    queue = pushed(*(Item(1000, key) for key in "ab" for _ in range(40)))
    used = {"a": 0, "b": 0}
    for _ in range(40):
        item = take(queue)
        used[item.key] += 1
        if item.key == "a":
            queue.charge("a", 3000)  # its answers are three times as long as its prompts
    assert 3.0 <= used["b"] / used["a"] <= 5.0


def test_a_key_that_comes_back_has_saved_nothing() -> None:
    queue = pushed(Item(50_000, "idle"))
    take(queue)
    for _ in range(20):
        queue.push(Item(1000, "busy"))
        take(queue)
    for _ in range(20):
        queue.push(Item(1000, "idle"))
        queue.push(Item(1000, "busy"))
    first = [take(queue).key for _ in range(10)]
    assert 4 <= first.count("idle") <= 6


def test_removed_items_never_come_up() -> None:
    items = [Item(10, key) for key in "abab"]
    queue = pushed(*items)
    for item in items[:3]:
        queue.remove(item)
    assert len(queue) == 1
    assert take(queue) is items[3]
    assert len(queue) == 0


def test_tokens_ahead_respect_priority_length_and_the_fair_share() -> None:
    queue = pushed(Item(5000, "a"), Item(100, "a"), Item(300, "b"), Item(70, "a", priority=1))
    assert queue.tokens_ahead(10, "a", 2) == 5470
    assert queue.tokens_ahead(6000, "a", 0) == 5400
    assert queue.tokens_ahead(200, "c", 0) == 400  # while it gets 200, so do both others
    assert queue.tokens_ahead(10, "c", -1) == 0


def test_the_memory_of_debts_is_bounded() -> None:
    queue = FairQueue()
    for i in range(2 * MAX_DEBTORS):
        queue.charge(f"key {i}", 10)
    assert len(queue._deficits) <= MAX_DEBTORS  # pyright: ignore[reportPrivateUsage]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5000), st.sampled_from("abc"), st.integers(-1, 1), st.sampled_from("ptr"))))
def test_nothing_is_lost_and_counts_stay_right(actions: list[tuple[int, str, int, str]]) -> None:
    queue, waiting = FairQueue(), list[Item]()
    for num_tokens, key, priority, action in actions:
        if action == "p" or not waiting:
            waiting.append(Item(num_tokens, key, priority))
            queue.push(waiting[-1])
        elif action == "t":
            item = take(queue)
            assert item.priority == min(other.priority for other in waiting)
            waiting.remove(item)
        else:
            queue.remove(waiting.pop(num_tokens % len(waiting)))
        assert (len(queue), queue.num_tokens) == (len(waiting), sum(item.num_tokens for item in waiting))
    assert {id(take(queue)) for _ in list(waiting)} == {id(item) for item in waiting}
    assert queue.head() is None
