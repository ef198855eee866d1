from __future__ import annotations

from typing import Any

import pytest

from baton.actors.engine.errors import ImportStateError, RequestEnded, RequestTooLarge
from baton.actors.engine.imports import ImportOpened, QuarantineKey
from baton.actors.engine.request import Request
from baton.actors.engine.updates import Update
from tests.actors.engine.rig import Rig, make_request
from tests.fakes import fake_kv, fake_output


@pytest.fixture(params=[True, False], ids=["overlap", "sync"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return request.param


def make_rig(overlap: bool = True, num_blocks: int = 64, **config: Any) -> Rig:
    return Rig(num_blocks, config={"max_num_seqs": 8, "max_step_tokens": 16, "overlap": overlap, **config})


def receive(rig: Rig, request: Request, skip_blocks: int, blocks: tuple[int, ...]) -> None:
    """A peer writes the prompt's KV into the reserved blocks."""
    for block, content in zip(blocks, fake_kv(request.tokens, rig.block_size)[skip_blocks:], strict=True):
        rig.runner.write_block(block, content)


def hand_over(rig: Rig, request: Request) -> ImportOpened:
    """Open, reserve, receive and adopt, as a decode worker would."""
    rig.expect(request)
    opened = rig.engine.open_import(request)
    blocks = rig.engine.reserve_import(request.id)
    assert blocks is not None
    receive(rig, request, opened.skip_blocks, blocks)
    first = tuple(fake_output(request, 1))
    rig.tokens[request.id].extend(first)
    rig.engine.adopt_import(request.id, first)
    return opened


def test_an_exported_prompt_reports_its_blocks_chunk_by_chunk_and_keeps_them(overlap: bool) -> None:
    rig = make_rig(overlap)
    request = make_request("r", 38, max_tokens=20, ignore_eos=True)
    rig.engine.submit(request, export=True)
    rig.expect(request)
    kv = fake_kv(request.tokens, 4)
    updates: list[Update] = []
    while rig.engine.has_work:
        for update in rig.step():
            for position in range(update.num_computed):
                assert rig.runner.kv[update.blocks[position // 4]][position % 4] == kv[position // 4][position % 4]
            updates.append(update)
    assert [update.num_computed for update in updates] == [0, 16, 32, 38]
    assert {update.blocks for update in updates} == {updates[0].blocks}
    assert len(updates[0].blocks) == 10
    assert [update.finish for update in updates] == [None, None, None, "length"]
    assert rig.tokens["r"] == fake_output(request, 1)
    assert rig.engine.counts().held == 10
    rig.engine.release("r")
    rig.engine.release("r")
    counts = rig.engine.counts()
    assert (counts.held, counts.cached) == (0, 9)


def test_an_export_with_a_cached_prefix_starts_from_it(overlap: bool) -> None:
    rig = make_rig(overlap)
    rig.submit(make_request("warm", 18, max_tokens=1))
    rig.run()
    rig.submit(make_request("r", 30), export=True)
    updates = rig.run()
    assert [update.num_computed for update in updates] == [16, 30]
    assert updates[-1].cached_tokens == 16
    rig.engine.cancel("r")  # a finished export can be cancelled too
    assert rig.engine.counts().held == 0


def test_an_exported_prompt_is_never_preempted(overlap: bool) -> None:
    rig = make_rig(overlap, num_blocks=14, max_num_seqs=4, max_step_tokens=8, headroom_blocks=0)
    rig.submit(make_request("a", (60, 1, 2, 3), max_tokens=30, ignore_eos=True))
    rig.submit(make_request("b", (61, 1, 2, 3), max_tokens=30, ignore_eos=True))
    rig.step()
    rig.submit(make_request("r", 40), export=True)
    while rig.engine.num_waiting == 0 or rig.num_starts("r") == 0:
        rig.step()  # until a block runs out, which must cost b its place, although r is younger
    assert "r" not in rig.finished
    rig.run()  # what runs stalls for the release, without spinning
    assert rig.finished.keys() == {"r"}
    assert rig.num_starts("r") == 1
    rig.engine.release("r")
    rig.run()
    del rig.requests["r"]
    rig.check_idle()


def test_an_imported_prompt_decodes_as_if_it_were_local(overlap: bool) -> None:
    rig = make_rig(overlap)
    request = make_request("r", 21, max_tokens=20, ignore_eos=True)
    assert hand_over(rig, request) == ImportOpened(skip_blocks=0, num_blocks=6, is_coming=False)
    rig.run()
    assert rig.finished["r"].cached_tokens == 21
    assert all(row.num_tokens == 1 for batch in rig.runner.launched for row in batch.rows)
    rig.check_idle()


def test_only_what_the_local_cache_lacks_is_asked_for(overlap: bool) -> None:
    rig = make_rig(overlap)
    hand_over(rig, make_request("first", 21, max_tokens=4))
    rig.run()
    assert hand_over(rig, make_request("second", 20, max_tokens=4)) == ImportOpened(4, num_blocks=5, is_coming=False)
    rig.run()
    rig.check_idle()


def test_a_first_token_that_ends_the_request_ends_it_at_adoption(overlap: bool) -> None:
    rig = make_rig(overlap)
    hand_over(rig, make_request("r", 21, max_tokens=1))
    [update] = rig.run()
    assert (update.tokens, update.finish) == ((), "length")
    assert rig.runner.launched == []
    assert len(rig.engine.snapshot()) == 5  # full blocks of the prompt are kept even so
    rig.check_idle()


def test_an_import_waits_for_room_and_leaves_the_running_theirs(overlap: bool) -> None:
    rig = make_rig(overlap, num_blocks=12)
    rig.submit(make_request("local", (70, *range(12)), max_tokens=12, ignore_eos=True))
    rig.step()
    request = make_request("r", 32, max_tokens=2)
    rig.expect(request)
    rig.engine.open_import(request)
    assert rig.engine.counts().free == 8
    assert rig.engine.reserve_import("r") is None  # 8 would fit, but the running sequence could not grow
    while rig.engine.has_work:
        rig.step()
    assert rig.num_starts("local") == 1
    blocks = rig.engine.reserve_import("r")
    assert blocks is not None and len(blocks) == 8
    rig.engine.abandon_import("r", quarantine=False)
    del rig.requests["r"]
    rig.check_idle()


def test_a_refused_import_keeps_its_turn_before_later_local_requests(overlap: bool) -> None:
    rig = make_rig(overlap, num_blocks=12)
    rig.submit(make_request("a", (70, *range(16)), max_tokens=8, ignore_eos=True))
    rig.step()
    request = make_request("r", 40, max_tokens=4)
    rig.engine.open_import(request)
    for number in range(40):
        if rig.engine.reserve_import("r") is not None:
            break
        rig.submit(make_request(f"s{number}", (80 + number, 2, 3), max_tokens=4))
        rig.step()
    assert rig.num_steps < 12
    rig.engine.abandon_import("r", quarantine=False)
    rig.run()
    rig.check_idle()


def test_an_import_needs_a_slot_too(overlap: bool) -> None:
    rig = make_rig(overlap, max_num_seqs=1)
    rig.submit(make_request("local", 3, max_tokens=4))
    rig.step()
    request = make_request("r", 9)
    rig.engine.open_import(request)
    assert rig.engine.reserve_import("r") is None
    rig.run()
    assert rig.engine.reserve_import("r") is not None
    rig.engine.abandon_import("r", quarantine=False)
    rig.submit(make_request("next", 3))
    rig.run()
    rig.check_idle()


def test_an_import_leaves_the_slot_that_an_earlier_request_waits_for(overlap: bool) -> None:
    rig = make_rig(overlap, max_num_seqs=1)
    rig.submit(make_request("running", 3, max_tokens=4, ignore_eos=True))
    rig.submit(make_request("waiting", 3, max_tokens=4, ignore_eos=True))
    rig.step()
    rig.engine.open_import(make_request("r", 9))
    while rig.engine.reserve_import("r") is None:  # asked before each step, so before the scheduler can choose
        rig.step()
    assert rig.finished.keys() == {"running", "waiting"}
    rig.engine.abandon_import("r", quarantine=False)
    rig.check_idle()


def test_late_writes_into_quarantined_blocks_reach_nobody(overlap: bool) -> None:
    """Entry 16, the engine's part: blocks of an aborted hand-over go to another request while a peer still writes."""
    rig = make_rig(overlap, num_blocks=14)
    request = make_request("r", 21, max_tokens=12, ignore_eos=True)
    rig.expect(request)
    attempts: list[tuple[QuarantineKey, tuple[int, ...]]] = []
    for _ in range(2):  # the second attempt while the first one is still in quarantine
        rig.engine.open_import(request)
        blocks = rig.engine.reserve_import("r")
        assert blocks is not None
        engine = rig.engine
        key = engine.cancel("r") if attempts else engine.abandon_import("r", quarantine=True)
        assert key is not None
        attempts.append((key, blocks))
    assert rig.engine.counts().held == 12
    rig.submit(request)  # prefilled here instead, once there is room
    rig.run()
    assert "r" not in rig.finished
    rig.engine.release_quarantine(attempts[0][0])
    rig.engine.release_quarantine(attempts[0][0])
    while rig.engine.has_work:
        for block in attempts[1][1]:
            rig.runner.write_block(block, [-7, -7, -7, -7])
        rig.step()
    rig.check_output("r")
    rig.engine.release_quarantine(attempts[1][0])
    rig.run()
    rig.check_idle()


def test_nothing_of_an_abandoned_import_enters_the_cache(overlap: bool) -> None:
    rig = make_rig(overlap)
    request = make_request("r", 21)
    rig.engine.open_import(request)
    rig.engine.reserve_import("r")
    assert rig.engine.abandon_import("r", quarantine=False) is None
    assert rig.engine.snapshot() == []
    assert rig.engine.counts().free == 64
    rig.submit(request)
    rig.run()
    assert rig.finished["r"].cached_tokens == 0
    rig.check_idle()


def test_cancelling_an_import_that_got_no_blocks_owes_nothing(overlap: bool) -> None:
    rig = make_rig(overlap)
    hand_over(rig, make_request("warm", 21, max_tokens=2))
    rig.run()
    rig.engine.open_import(make_request("r", 30))
    assert rig.engine.counts().held == 5
    assert rig.engine.cancel("r") is None
    rig.check_idle()


def test_calls_out_of_order_name_the_request_and_the_remedy() -> None:
    rig = make_rig()
    with pytest.raises(ImportStateError, match="'r': not open"):
        rig.engine.reserve_import("r")
    rig.engine.open_import(make_request("r", 9))
    with pytest.raises(ImportStateError, match="no blocks are reserved"):
        rig.engine.adopt_import("r", (5,))
    rig.engine.reserve_import("r")
    with pytest.raises(ImportStateError, match="reserved already"):
        rig.engine.reserve_import("r")
    with pytest.raises(ImportStateError, match="one token, not 2"):
        rig.engine.adopt_import("r", (5, 6))
    with pytest.raises(RequestEnded, match="its last token"):
        rig.engine.open_import(make_request("done", 20, num_output=8, max_tokens=8))
    with pytest.raises(RequestTooLarge):
        rig.engine.open_import(make_request("huge", 1000))


def test_an_adopted_sequence_can_be_preempted_and_recomputed(overlap: bool) -> None:
    rig = make_rig(overlap, num_blocks=16, headroom_blocks=0)
    rig.submit(make_request("local", (70, *range(14)), max_tokens=24, ignore_eos=True))
    rig.step()
    hand_over(rig, make_request("r", 21, max_tokens=24, ignore_eos=True))
    rig.run()
    assert rig.num_starts("r") > 1
    rig.check_idle()
