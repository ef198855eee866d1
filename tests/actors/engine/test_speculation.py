"""Drafts that are all right, all wrong, and in between: whatever is guessed, the engine says the same."""

from __future__ import annotations

from typing import Any

import pytest

from baton.actors.engine.draft_length import FixedLengths
from baton.actors.engine.request import TokenLogprobs
from baton.actors.engine.speculation import DraftSpeculation
from baton.actors.engine.updates import Update
from tests.actors.engine.rig import Rig, make_request
from tests.actors.engine.scripted import NumRight, Scripted, all_right, none_right, scripted, some_right
from tests.fakes import fake_kv

SCRIPTS = {"all right": all_right, "none right": none_right, "some right": some_right}
scripts = pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())


def life(updates: list[Update], id: str) -> tuple[list[int], list[TokenLogprobs], Any, int]:
    """All that a client can see of a request."""
    own = [update for update in updates if update.request_id == id]
    logprobs = [entry for update in own for entry in update.logprobs or ()]
    return [t for u in own for t in u.tokens], logprobs, own[-1].finish, own[-1].cached_tokens


def lives(rig: Rig, ids: list[str]) -> list[Any]:
    updates = rig.run()
    rig.check_idle()
    return [life(updates, id) for id in ids]


@scripts
@pytest.mark.parametrize(("prefix_cache", "overlap"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("k", range(1, 9))
def test_nobody_sees_the_drafts(script: NumRight, k: int, prefix_cache: bool, overlap: bool) -> None:
    requests = [
        make_request("a", 11, max_tokens=30, logprobs=0, seed=1),
        make_request("b", 8, max_tokens=1, logprobs=0, seed=2),
        make_request("c", 23, max_tokens=17, logprobs=0, seed=3, ignore_eos=True),
        make_request("d", 23, max_tokens=40, logprobs=0, seed=4, min_tokens=9, stop_token_ids=(7, 9)),
    ]
    config: dict[str, Any] = {"prefix_cache": prefix_cache, "overlap": overlap, "max_step_tokens": 24}
    config |= {"max_prefill_chunk": 7, "max_num_seqs": 4}
    seen: list[Any] = []
    for speculation in (None, scripted(script, k)):
        rig = Rig(config=config, speculation=speculation)
        for request in requests:
            rig.submit(request)
        seen.append(lives(rig, [request.id for request in requests]))
        if prefix_cache:  # what was cached is right, too
            rig.submit(make_request("again", 11 + 4, max_tokens=30, seed=1))
            rig.run()
            rig.check_idle()
    assert seen[0] == seen[1]


def test_right_drafts_save_steps_and_wrong_ones_cost_none() -> None:
    num_steps: list[int] = []
    for speculation in (None, scripted(all_right, 4), scripted(none_right, 4)):
        rig = Rig(speculation=speculation, config={"overlap": False})
        rig.submit(make_request("a", 5, max_tokens=41, ignore_eos=True))
        rig.run()
        rig.check_idle()
        num_steps.append(rig.num_steps)
    assert num_steps == [41, 9, 41]


def test_no_draft_lies_behind_the_end() -> None:
    """Neither max_tokens nor the context is ever passed, and a sequence one token from its end drafts nothing."""
    for max_tokens, max_context in ((6, 1000), (100, 14)):
        rig = Rig(max_context=max_context, speculation=scripted(all_right, 8), config={"overlap": False})
        rig.submit(make_request("a", 8, max_tokens=max_tokens, ignore_eos=True))
        rig.run()
        rig.check_idle()
        rows = [row for batch in rig.runner.launched for row in batch.rows]
        assert max(row.end for row in rows) <= 8 + 6 - 1
        assert [row.num_drafts for row in rows] == [0, 4]


@scripts
def test_a_draft_never_preempts(script: NumRight) -> None:
    """A pool that holds what runs and no draft beside it: as many preemptions as without."""
    starts: list[int] = []
    for speculation in (None, scripted(script, 8)):
        rig = Rig(num_blocks=14, config={"prefix_cache": False}, speculation=speculation)
        for id in "abcd":
            rig.submit(make_request(id, 9, max_tokens=20, seed=ord(id), ignore_eos=True))
        rig.run()
        rig.check_idle()
        starts.append(sum(rig.num_starts(id) for id in "abcd"))
    assert starts[1] <= starts[0]


@scripts
def test_rejected_kv_is_neither_cached_nor_handed_over(script: NumRight) -> None:
    rig = Rig(speculation=scripted(script, 7))
    rig.submit(make_request("a", 6, max_tokens=19, ignore_eos=True))
    rig.run()
    follow_up = make_request("b", rig.requests["a"].tokens + tuple(rig.tokens["a"]), max_tokens=9)
    rig.submit(follow_up, export=True)
    rig.requests.pop("b")
    rig.run()
    assert rig.finished["b"].cached_tokens == 24  # every full block of the answer
    for block, content in zip(rig.finished["b"].blocks, fake_kv(follow_up.tokens, 4), strict=True):
        assert rig.runner.kv[block][: len(content)] == content
    rig.engine.release("b")
    rig.check_idle()


def test_a_stop_inside_the_drafts_ends_text_ids_and_logprobs_there() -> None:
    """Entry S10, on the engine's side: what was verified behind a stop id is nobody's token."""
    plain = Rig()
    plain.submit(make_request("a", 5, max_tokens=30, ignore_eos=True))
    plain.run()
    for position in range(1, 8):
        stop = plain.tokens["a"][position]
        first = plain.tokens["a"].index(stop)
        rig = Rig(speculation=scripted(all_right, 5))
        rig.submit(make_request("a", 5, max_tokens=30, ignore_eos=True, stop_token_ids=(stop,), logprobs=0))
        tokens, logprobs, finish, _ = life(rig.run(), "a")
        assert tokens == plain.tokens["a"][: first + 1] and finish == "stop"
        assert [entry.chosen for entry in logprobs] == [-float(token) for token in tokens]
        rig.check_idle()


def test_a_cancel_between_drafted_steps_frees_everything() -> None:
    speculation = scripted(some_right, 5)
    rig = Rig(speculation=speculation, config={"overlap": True})
    for id in "ab":
        rig.submit(make_request(id, 9, max_tokens=40, ignore_eos=True))
    for _ in range(4):
        rig.step()
    rig.engine.cancel("a")
    del rig.requests["a"]
    rig.run()
    rig.check_idle()
    drafter = speculation._drafter
    assert isinstance(drafter, Scripted) and drafter.num_forgotten == 2 and not drafter.known


def test_a_preempted_sequence_goes_on_drafting_where_it_was() -> None:
    rig = Rig(num_blocks=12, config={"max_num_seqs": 3}, speculation=scripted(some_right, 3))
    for id in "abc":
        rig.submit(make_request(id, 8, max_tokens=24, seed=ord(id), ignore_eos=True))
    rig.run()
    rig.check_idle()
    assert sum(rig.num_starts(id) for id in "abc") > 3


@pytest.mark.parametrize("overlap", [False, True])
def test_prompts_whose_chunks_end_anywhere_draft_after_the_last_chunk_only(overlap: bool) -> None:
    """Entry S8: prompt lengths around chunk and block borders, two at once, then both again from the cache."""
    for length in (3, 4, 5, 7, 8, 9, 12, 13, 16, 17):
        config: dict[str, Any] = {"max_step_tokens": 12, "max_prefill_chunk": 8, "max_num_seqs": 4, "overlap": overlap}
        rig = Rig(config=config, speculation=scripted(all_right, 4))
        for repeat in range(2):
            for id, extra in (("a", 0), ("b", 3)):
                request = make_request(f"{id}{repeat}", length + extra, max_tokens=12, ignore_eos=True)
                rig.submit(request)
            rig.run()
            rig.check_idle()
        for batch in rig.runner.launched:
            assert all(row.num_drafts == 0 or row.start >= length for row in batch.rows)


def test_neighbours_that_come_and_go_change_nobodys_text() -> None:
    """Entry S9: one request repeated while others with other seeds run, some of which have no drafts."""

    class OnlyOdd(Scripted):
        def propose(self, sequence: Any, num: int) -> list[int]:
            return super().propose(sequence, num) if sequence.request.sampling.seed % 2 else []

    speculation = DraftSpeculation(OnlyOdd(some_right), FixedLengths(), 4)
    rig = Rig(num_blocks=200, config={"max_num_seqs": 6}, speculation=speculation)
    alone = Rig()
    alone.submit(make_request("x", 10, max_tokens=25, seed=77, ignore_eos=True))
    alone.run()
    for round in range(5):
        rig.submit(make_request(f"x{round}", 10, max_tokens=25, seed=77, ignore_eos=True))
        for i in range(5):
            rig.submit(make_request(f"n{round}.{i}", 6 + i, max_tokens=5 + 3 * i, seed=10 * round + i))
        for _ in range(9):
            if rig.engine.has_work:
                rig.step()
    rig.run()
    rig.check_idle()
    assert all(rig.tokens[f"x{round}"] == alone.tokens["x"] for round in range(5))


def test_drafts_are_counted_by_position() -> None:
    speculation = scripted(lambda _: 2, 4)
    rig = Rig(speculation=speculation, config={"overlap": False})
    rig.submit(make_request("a", 5, max_tokens=13, ignore_eos=True))
    rig.run()
    assert speculation.counts.verified == [4, 4, 3, 3]
    assert speculation.counts.accepted == [4, 4, 0, 0]


def test_a_wired_batch_keeps_its_drafts() -> None:
    rig = Rig(is_wired=True, speculation=scripted(some_right, 6))
    rig.submit(make_request("a", 9, max_tokens=33, ignore_eos=True))
    rig.run()
    rig.check_idle()
