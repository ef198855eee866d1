"""Random schedules against the hand-over protocol; see handover_world for the faults and the invariants."""

from __future__ import annotations

import os
from collections import Counter

from handover_schedule import play, play_seed
from handover_world import World
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

NUM_SCHEDULES = int(os.environ.get("BATON_SCHEDULES", "500"))


def test_no_seeded_schedule_breaks_an_invariant() -> None:
    for seed in range(NUM_SCHEDULES):
        try:
            play_seed(seed)
        except Exception as error:
            error.add_note(f"replay with play_seed({seed})")
            raise


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.lists(st.integers(0, 2**16), min_size=20, max_size=300))
def test_no_generated_schedule_breaks_an_invariant(tape: list[int]) -> None:
    remaining = iter(tape)
    world = World(lambda n: next(remaining, 0) % n)
    play(world, num_moves=len(tape) // 2)


def test_the_schedules_reach_every_kind_of_end() -> None:
    """Guard the model itself: a world in which nothing lands or nothing is aborted would prove nothing."""
    seen: Counter[str] = Counter()
    for seed in range(60):
        seen += play_seed(seed).seen
    for kind in ("Land", "Drop", "Fallback", "Quarantine", "Unquarantine", "Unreserve", "Hold", "Failed", "Stopped"):
        assert seen[kind] > 0, f"no schedule had a {kind}: {seen}"
