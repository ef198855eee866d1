from __future__ import annotations

from typing import Any

import pytest

from baton.actors.engine.errors import NoProgress
from tests.actors.engine.rig import Rig, make_request


@pytest.fixture(params=[True, False], ids=["overlap", "sync"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return request.param


def make_rig(overlap: bool, num_blocks: int, block_size: int = 16, **config: Any) -> Rig:
    return Rig(num_blocks, block_size, config={"overlap": overlap, **config})


def unique(number: int, length: int) -> tuple[int, ...]:
    """A prompt that shares no block with any other number's."""
    return (100 + number, *(2 + position % 47 for position in range(length - 1)))


def long_prompt_rig(overlap: bool) -> Rig:
    return make_rig(overlap, 2000, max_num_seqs=16, max_step_tokens=256, max_prefill_chunk=192)


def test_decodes_step_and_a_newcomer_starts_while_a_long_prompt_prefills(overlap: bool) -> None:
    """Entry 25: a long prefill takes the whole budget; decodes stall and a short request waits for minutes."""
    rig = long_prompt_rig(overlap)
    decoding = [f"d{number}" for number in range(3)]
    for number, id in enumerate(decoding):
        rig.submit(make_request(id, unique(number, 20), max_tokens=120, ignore_eos=True))
    while rig.engine.waiting_tokens:
        rig.step()
    rig.submit(make_request("long", 20_000, max_tokens=4))
    rig.step()
    rig.submit(make_request("newcomer", unique(9, 10), max_tokens=2))
    rig.step()
    rig.step()
    assert rig.tokens["newcomer"], "the newcomer has its first token within two steps"
    before = {id: len(rig.tokens[id]) for id in decoding}
    for _ in range(50):
        rig.step()
    assert {id: len(rig.tokens[id]) - before[id] for id in decoding} == dict.fromkeys(decoding, 50)
    assert "long" not in rig.finished
    rig.run()
    rig.check_idle()


def test_a_long_prompt_ends_under_a_constant_stream_of_short_ones(overlap: bool) -> None:
    """Entry 25, the other half: bounded slowdown of the long one."""
    rig = long_prompt_rig(overlap)
    rig.submit(make_request("long", 20_000, max_tokens=1))
    for number in range(200):
        if "long" in rig.finished:
            break
        for twin in range(4):  # together 400 tokens a step, more than the whole budget
            rig.submit(make_request(f"s{number}.{twin}", unique(4 * number + twin, 100), max_tokens=1))
        rig.step()
    assert rig.num_steps <= 20_000 / 192 + 16 * 100 / 256 + 3  # after 16 overtakes it starts, then 192 tokens a step
    started = sum(rig.num_starts(id) for id in rig.tokens) - 1
    assert started >= 40  # the rest of the budget went to the short ones
    rig.run()
    rig.check_idle()


def test_a_long_prompt_starts_under_a_constant_stream_of_short_ones(overlap: bool) -> None:
    rig = make_rig(overlap, 200, max_num_seqs=2, max_step_tokens=64, max_overtakes=10)
    for number in range(3):
        rig.submit(make_request(f"early{number}", unique(number, 8), max_tokens=2))
    rig.submit(make_request("long", 600, max_tokens=1))
    for number in range(300):
        rig.submit(make_request(f"s{number}", unique(10 + number, 8), max_tokens=2))
        rig.step()
        if rig.num_starts("long"):
            break
    assert sum(rig.num_starts(id) > 0 for id in rig.tokens if id.startswith("s")) <= 10
    rig.run()
    rig.check_idle()


def test_a_prompt_alone_takes_the_whole_budget(overlap: bool) -> None:
    rig = make_rig(overlap, 100, max_num_seqs=4, max_step_tokens=64, max_prefill_chunk=16)
    rig.submit(make_request("r", 130, max_tokens=1))
    rig.run()
    assert [batch.num_tokens for batch in rig.runner.launched] == [64, 64, 2]


def test_what_others_do_not_want_goes_to_the_eldest(overlap: bool) -> None:
    rig = make_rig(overlap, 100, max_num_seqs=4, max_step_tokens=64, max_prefill_chunk=16)
    rig.submit(make_request("a", unique(1, 200), max_tokens=1))
    rig.submit(make_request("b", unique(2, 300), max_tokens=1))
    rig.step()
    assert [row.num_tokens for row in rig.runner.launched[0].rows] == [48, 16]
    rig.run()
    rig.check_idle()


def test_the_longest_cached_prefix_starts_first_among_equals(overlap: bool) -> None:
    rig = make_rig(overlap, 100, block_size=4, max_num_seqs=1, max_step_tokens=16)
    rig.submit(make_request("cold", 12, max_tokens=1))
    rig.run()
    rig.submit(make_request("none", unique(1, 14), max_tokens=1))
    rig.submit(make_request("most", 14, max_tokens=1))
    rig.submit(make_request("first", unique(2, 2), max_tokens=1, priority=-1))
    rig.submit(make_request("last", unique(3, 2), max_tokens=1, priority=1))
    rig.run()
    starts = [admission.request.id for batch in rig.runner.launched for admission in batch.admissions]
    assert starts == ["cold", "first", "most", "none", "last"]
    rig.check_idle()


@pytest.mark.parametrize("seed", range(3))
def test_a_full_pool_thrashes_nobody(seed: int, overlap: bool) -> None:
    """Entry 26: preempt, lose all progress, prefill again, preempt; and one shortage preempting the whole queue."""
    rig = make_rig(overlap, 64, max_num_seqs=8, max_step_tokens=1024)
    requests = [
        make_request(f"r{number}", unique(number, 6 * 16), max_tokens=160, ignore_eos=True, seed=seed + number)
        for number in range(8)
    ]
    for request in requests:
        rig.submit(request)
    while rig.engine.has_work:
        before = rig.engine.num_waiting
        rig.step()
        assert rig.engine.num_waiting <= before + 2  # a shortage costs a victim or two, not the queue
        rig.engine.check_integrity()
    starts = [rig.num_starts(request.id) for request in requests]
    assert starts[0] == 1  # the eldest is never preempted
    assert max(starts) == 2
    rig.check_idle()


@pytest.mark.parametrize("max_preemptions", [1, 2])
def test_preemptions_of_one_sequence_are_bounded(max_preemptions: int, overlap: bool) -> None:
    """Entry 26: here a sequence would be preempted five times and more, were it not to wait for its whole room."""
    config = {"max_num_seqs": 24, "max_step_tokens": 1024, "headroom_blocks": 0, "max_preemptions": max_preemptions}
    rig = make_rig(overlap, 40, block_size=4, **config)
    for number in range(24):
        rig.submit(make_request(f"r{number}", unique(number, 4), max_tokens=50, ignore_eos=True))
    rig.run()
    assert max(rig.num_starts(id) for id in rig.requests) == max_preemptions + 1
    rig.check_idle()


def test_preemption_takes_the_youngest_of_the_least_urgent(overlap: bool) -> None:
    rig = make_rig(overlap, 12, block_size=4, max_num_seqs=4, max_step_tokens=64, headroom_blocks=0)
    rig.submit(make_request("late", unique(1, 11), max_tokens=20, ignore_eos=True, priority=1))
    rig.submit(make_request("old", unique(2, 11), max_tokens=20, ignore_eos=True))
    rig.submit(make_request("young", unique(3, 11), max_tokens=20, ignore_eos=True))
    rig.run()
    assert rig.num_starts("late") > 1
    assert rig.num_starts("old") == 1
    rig.check_idle()


def test_a_sequence_alone_may_use_the_whole_pool(overlap: bool) -> None:
    rig = make_rig(overlap, 8, block_size=4, max_num_seqs=4, max_step_tokens=64)
    rig.submit(make_request("r", 20, max_tokens=1000, ignore_eos=True))
    rig.run()
    assert len(rig.tokens["r"]) == 12
    assert rig.finished["r"].finish == "length"
    rig.check_idle()


def test_a_large_request_is_not_starved_of_blocks_by_small_ones(overlap: bool) -> None:
    rig = make_rig(overlap, 24, block_size=4, max_num_seqs=8, max_step_tokens=200)
    for number in range(3):
        rig.submit(make_request(f"e{number}", unique(number, 16), max_tokens=8, ignore_eos=True))
    rig.step()
    rig.submit(make_request("large", unique(50, 80), max_tokens=2))
    for number in range(60):
        rig.submit(make_request(f"s{number}", unique(100 + number, 8), max_tokens=8, ignore_eos=True))
        rig.step()
        if "large" in rig.finished:
            break
    assert "large" in rig.finished
    assert rig.num_steps < 20
    rig.run()
    rig.check_idle()


def test_a_cancelled_request_no_longer_claims_the_room_it_was_refused(overlap: bool) -> None:
    rig = make_rig(overlap, 16, block_size=4, max_num_seqs=4, max_step_tokens=64)
    rig.submit(make_request("running", unique(1, 20), max_tokens=20, ignore_eos=True))
    rig.step()
    rig.submit(make_request("large", unique(2, 60), max_tokens=2))
    rig.step()
    rig.submit(make_request("small", unique(3, 8), max_tokens=2))
    rig.step()
    assert rig.num_starts("large") == rig.num_starts("small") == 0
    rig.engine.cancel("large")
    del rig.requests["large"]
    rig.step()
    assert rig.num_starts("small") == 1
    rig.run()
    rig.check_idle()


def test_work_that_can_never_run_raises_instead_of_spinning() -> None:
    rig = make_rig(True, 8, block_size=4, max_num_seqs=4, max_step_tokens=64)
    leaked = rig.engine._space.pool.allocate(5)  # pyright: ignore[reportPrivateUsage]
    rig.submit(make_request("r", 20))
    with pytest.raises(NoProgress, match="1 waiting and 0 running"):
        rig.run()
    assert len(leaked) == 5


def chunks_of(rig: Rig) -> list[int]:
    return [row.num_tokens for batch in rig.runner.launched for row in batch.rows]


@pytest.mark.parametrize(
    ("prompt_len", "chunks"), [(48, [48]), (49, [41, 8]), (59, [48, 11]), (64, [48, 8, 8]), (152, [48, 48, 48, 8])]
)
def test_a_long_prompt_computed_for_a_peer_ends_in_a_short_chunk(
    overlap: bool, prompt_len: int, chunks: list[int]
) -> None:
    """Its KV leaves chunk by chunk, so the last chunk's is all that the peer waits for when prefill has ended."""
    rig = make_rig(overlap, 200, max_num_seqs=4, max_step_tokens=256, export_chunk=48, export_last_chunk=8)
    rig.submit(make_request("r", prompt_len, max_tokens=1), export=True)
    rig.run()
    assert chunks_of(rig) == chunks
    rig.engine.release("r")
    rig.check_idle()


def test_a_prompt_computed_for_a_peer_counts_only_what_its_cache_lacks(overlap: bool) -> None:
    rig = make_rig(overlap, 200, max_num_seqs=4, max_step_tokens=256, export_chunk=48, export_last_chunk=8)
    rig.submit(make_request("warm", 128, max_tokens=1))
    rig.run()
    rig.runner.launched.clear()
    rig.submit(make_request("r", 160, max_tokens=1), export=True)
    rig.run()
    assert chunks_of(rig) == [32]


def test_the_chunks_of_an_export_leave_the_rest_of_the_step_to_others(overlap: bool) -> None:
    rig = make_rig(overlap, 200, max_num_seqs=4, max_step_tokens=256, export_chunk=48, export_last_chunk=8)
    rig.submit(make_request("r", unique(1, 152), max_tokens=1), export=True)
    rig.submit(make_request("own", unique(2, 200), max_tokens=1))
    rig.step()
    assert chunks_of(rig) == [48, 200]


def test_equal_prompts_are_computed_once() -> None:
    rig = Rig(block_size=4, config={"max_step_tokens": 64, "max_prefill_chunk": 64, "max_num_seqs": 8})
    for i in range(4):
        rig.submit(make_request(f"r{i}", 22, seed=i))
    rig.run()
    computed = sum(row.num_tokens for batch in rig.runner.launched for row in batch.rows if row.num_tokens > 1)
    assert computed == 22 + 3 * 2  # the first one's 22, then of each the two tokens past the last full block
    rig.check_idle()


def test_who_waits_for_a_prefix_does_not_hold_others_up_and_goes_on_when_it_does_not_come() -> None:
    rig = Rig(block_size=4, config={"max_step_tokens": 8, "max_prefill_chunk": 4, "max_num_seqs": 8})
    rig.submit(make_request("first", 40))
    rig.step()
    rig.submit(make_request("same", 40, seed=2))
    rig.submit(make_request("other", tuple(range(30, 36))))
    rig.step()
    assert rig.num_starts("same") == 0 and rig.num_starts("other") == 1
    rig.engine.cancel("first")
    del rig.requests["first"]
    rig.run()
    rig.check_idle()
