from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from baton.actors.engine.errors import DuplicateRequest
from baton.actors.engine.request import TokenLogprobs
from tests.actors.engine.rig import EOS, Rig, make_request
from tests.fakes import fake_kv, fake_output


@pytest.fixture(params=[True, False], ids=["overlap", "sync"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return request.param


def make_rig(overlap: bool, **options: Any) -> Rig:
    sizes = {name: options.pop(name) for name in ("num_blocks", "block_size", "max_context") if name in options}
    return Rig(**sizes, config={"max_num_seqs": 8, "max_step_tokens": 64, "overlap": overlap, **options})


def find_stopping_prompt(num_output: int) -> tuple[int, ...]:
    """A prompt after which the fake model first says an EOS id as its output number `num_output`."""
    for start in range(10_000):
        prompt = (start, 3, 4)
        output = fake_output(make_request("r", prompt), num_output)
        if output[-1] in EOS and not EOS & set(output[:-1]):
            return prompt
    raise AssertionError("no such prompt")


def test_chunks_and_batching_do_not_change_the_tokens(overlap: bool) -> None:
    rig = make_rig(overlap, num_blocks=200)
    for number in range(12):
        rig.submit(make_request(f"r{number}", 3 + 17 * number, max_tokens=20, seed=number))
    rig.run()
    rig.check_idle()


def test_overlap_launches_a_step_before_it_knows_the_last_ones_tokens() -> None:
    rig = make_rig(True)
    rig.submit(make_request("r", 6, max_tokens=4, ignore_eos=True))
    assert [update.tokens for update in rig.step()] == [()]  # only that it has started
    assert len(rig.step()[0].tokens) == 1
    decode = rig.runner.launched[1].rows[0]
    assert (decode.start, decode.num_tokens, decode.tokens) == (6, 1, ())
    rig.run()
    assert len(rig.runner.launched) == 4  # no step is wasted on an end by length
    rig.check_idle()


def test_without_overlap_each_step_yields_its_own_token() -> None:
    rig = make_rig(False)
    rig.submit(make_request("r", 6, max_tokens=4, ignore_eos=True))
    assert [len(update.tokens) for update in rig.step()] == [0, 1]
    assert len(rig.step()[0].tokens) == 1
    [decode] = rig.runner.launched[1].rows
    assert decode.tokens == (rig.tokens["r"][0],)


def test_the_token_sampled_past_the_end_is_dropped_and_its_block_freed(overlap: bool) -> None:
    prompt = find_stopping_prompt(num_output=2)  # 3 + 2 tokens: the wasted step writes a new block of 4
    rig = make_rig(overlap)
    rig.submit(make_request("r", prompt, max_tokens=50))
    rig.run()
    assert rig.finished["r"].finish == "stop"
    assert rig.tokens["r"][-1] in EOS
    assert len(rig.runner.launched) == (3 if overlap else 2)
    rig.check_idle()


def test_two_eos_ids_stop_ids_and_min_tokens(overlap: bool) -> None:
    prompt = find_stopping_prompt(num_output=3)
    output = fake_output(make_request("r", prompt), 8)
    rig = make_rig(overlap)
    rig.submit(make_request("eos", prompt))
    rig.submit(make_request("ignore", prompt, ignore_eos=True))
    rig.submit(make_request("min", prompt, min_tokens=3))
    rig.submit(make_request("id", prompt, stop_token_ids=(output[1],)))
    rig.run()
    lengths = {name: len(tokens) for name, tokens in rig.tokens.items()}
    assert lengths == {"eos": 3, "ignore": 8, "min": 8 if not EOS & set(output[3:]) else lengths["min"], "id": 2}
    assert rig.finished["id"].finish == "stop"
    assert rig.finished["ignore"].finish == "length"
    rig.check_idle()


def test_a_migrated_request_goes_on_from_its_tokens(overlap: bool) -> None:
    whole = make_request("r", 10, max_tokens=20, ignore_eos=True)
    output = fake_output(whole, 20)
    rig = make_rig(overlap)
    rig.submit(make_request("r", (*whole.tokens, *output[:12]), num_output=12, max_tokens=20, ignore_eos=True))
    rig.submit(make_request("done", (*whole.tokens, *output), num_output=20, max_tokens=20, ignore_eos=True))
    rig.run()
    assert rig.tokens["r"] == output[12:]
    assert (rig.tokens["done"], rig.finished["done"].finish) == ([], "length")


def test_a_cached_prefix_is_not_computed_again(overlap: bool) -> None:
    rig = make_rig(overlap)
    for name in ("cold", "warm"):
        rig.submit(make_request(name, 18))
        rig.run()
    rig.submit(make_request("salted", 18, cache_salt="other"))
    rig.run()
    assert [rig.finished[name].cached_tokens for name in ("cold", "warm", "salted")] == [0, 16, 0]
    rig.check_idle()


def test_the_last_prompt_token_is_always_computed(overlap: bool) -> None:
    """A prompt that is cached whole still needs logits: at most prompt_len - 1 tokens match."""
    rig = make_rig(overlap)
    for name in ("cold", "warm"):
        rig.submit(make_request(name, 16))
        rig.run()
    assert rig.finished["warm"].cached_tokens == 12
    rig.check_idle()


def test_without_prefix_cache_nothing_is_kept(overlap: bool) -> None:
    rig = make_rig(overlap, prefix_cache=False)
    for name in ("cold", "warm"):
        rig.submit(make_request(name, 18))
        rig.run()
    assert rig.finished["warm"].cached_tokens == 0
    assert rig.engine.counts().cached == 0
    rig.check_idle()


@pytest.mark.parametrize("prompt", [3, 4, 5, 7, 8, 9, 15, 16, 17])
def test_chunk_and_block_borders_change_nothing(prompt: int, overlap: bool) -> None:
    """Entry S8: a token proposed from a non-final chunk, or a half-filled block cached as a whole one."""
    rig = make_rig(overlap, max_step_tokens=8, max_prefill_chunk=3)
    for life in ("cold", "warm"):
        rig.submit(make_request(f"{life} a", prompt, max_tokens=9))
        rig.submit(make_request(f"{life} b", prompt + 1, max_tokens=9))
        rig.run()
        full_blocks = {
            tuple(fake_kv(r.tokens, 4)[number]) for r in rig.requests.values() for number in range(prompt // 4)
        }
        assert full_blocks <= {tuple(block) for block in rig.runner.kv}
    samples = [row for batch in rig.runner.launched for row in batch.rows if row.sample and len(row.tokens) > 1]
    assert {row.end for row in samples} <= {prompt, prompt + 1}  # never after a chunk that is not the last
    one_chunk = make_rig(overlap, prefix_cache=False)
    for request in rig.requests.values():
        one_chunk.submit(request)
    one_chunk.run()
    assert one_chunk.tokens == rig.tokens
    rig.check_idle()


def test_only_full_computed_blocks_become_matchable(overlap: bool) -> None:
    rig = make_rig(overlap)
    rig.submit(make_request("r", 18, max_tokens=4, ignore_eos=True))
    rig.run()
    events = rig.engine.take_events()  # 18 + 3 positions have KV: the last token's is never computed
    assert len(events.stored) == 5
    assert rig.engine.snapshot() == events.stored
    assert rig.engine.take_events().stored == []


def test_a_flushed_cache_matches_nothing_and_what_ran_publishes_no_more(overlap: bool) -> None:
    rig = make_rig(overlap)
    rig.submit(make_request("old", 18, max_tokens=16, ignore_eos=True))
    for _ in range(4):
        rig.step()
    rig.engine.flush_cache()
    rig.run()
    assert rig.engine.snapshot() == []
    assert rig.engine.counts().cached == 0
    rig.submit(make_request("new", 18))
    rig.run()
    assert rig.finished["new"].cached_tokens == 0
    assert len(rig.engine.snapshot()) >= 4
    rig.check_idle()


def test_logprobs_run_parallel_to_tokens(overlap: bool) -> None:
    rig = make_rig(overlap)
    rig.submit(make_request("with", 5, logprobs=0, max_tokens=3, ignore_eos=True))
    rig.submit(make_request("without", 5, max_tokens=3, ignore_eos=True))
    for update in rig.run():
        wanted = tuple(TokenLogprobs(-float(token)) for token in update.tokens) or None
        assert update.logprobs == (wanted if update.request_id == "with" else None)


@pytest.mark.parametrize("num_steps", range(6))
def test_cancel_in_any_state_frees_everything_and_says_nothing_more(num_steps: int, overlap: bool) -> None:
    rig = make_rig(overlap, max_step_tokens=8)
    rig.submit(make_request("stays", 18, max_tokens=12))
    rig.submit(make_request("goes", 25, max_tokens=30, ignore_eos=True))
    for _ in range(num_steps):
        rig.step()
    rig.engine.cancel("goes")
    rig.engine.cancel("goes")
    rig.engine.cancel("unknown")
    assert not any(update.request_id == "goes" for update in rig.run())
    del rig.requests["goes"]
    rig.check_idle()


def test_cancel_drops_an_update_that_was_not_yet_delivered() -> None:
    rig = make_rig(True)
    rig.submit(make_request("r", 10_000))
    rig.engine.cancel("r")
    assert rig.run() == []


def test_a_request_that_can_never_fit_ends_with_an_error_that_names_the_blocks() -> None:
    rig = make_rig(True, num_blocks=8)
    rig.submit(make_request("r", 32))
    [update] = rig.run()
    assert update.finish == "error"
    assert update.error is not None and "needs 9 KV blocks; this worker has 8" in update.error
    rig.submit(make_request("fits", 31, max_tokens=100))
    rig.run()
    rig.check_output("fits")


def test_two_live_requests_with_one_id_are_refused() -> None:
    rig = make_rig(True)
    rig.submit(make_request("r", 5))
    with pytest.raises(DuplicateRequest, match="'r'"):
        rig.engine.submit(make_request("r", 6))
    with pytest.raises(DuplicateRequest):
        rig.engine.open_import(make_request("r", 6))
    rig.run()
    rig.check_idle()


def test_an_idle_engine_has_no_work_and_a_step_is_harmless() -> None:
    rig = make_rig(True)
    assert not rig.engine.has_work
    assert rig.step() == []


def test_aborting_between_two_chunks_poisons_nothing(overlap: bool) -> None:
    """Entry 22: duplicates freed under a live table, in-use leaves evicted, a node of an aborted chunk reused."""
    rig = make_rig(overlap, num_blocks=48, max_step_tokens=24, max_prefill_chunk=8)
    rig.submit(make_request("first", 30, max_tokens=64, ignore_eos=True))
    rig.submit(make_request("twin", 30, max_tokens=64, ignore_eos=True))
    rig.submit(make_request("pressure", tuple(range(50, 80)), max_tokens=64, ignore_eos=True))
    rig.step()
    rig.step()
    assert rig.engine.waiting_tokens > 0  # the twins are between two chunks
    rig.engine.cancel("twin")
    del rig.requests["twin"]
    rig.submit(make_request("third", 30, max_tokens=64, ignore_eos=True))
    while rig.engine.has_work:
        rig.step()
        rig.engine.check_integrity()
    rig.submit(make_request("last", 30, max_tokens=64, ignore_eos=True))
    rig.run()
    rig.check_idle()


def test_twin_prompts_prefilled_at_once_decode_correctly_under_eviction(overlap: bool) -> None:
    """Entry 22, its first half: neither twin sees the other, and both outlive the other's blocks."""
    rig = make_rig(overlap, num_blocks=52, max_step_tokens=80)
    rig.submit(make_request("a", 30, max_tokens=64, ignore_eos=True))
    rig.submit(make_request("b", 30, max_tokens=60, ignore_eos=True))
    for number in range(30):
        rig.submit(make_request(f"p{number}", (60 + number, *range(9)), max_tokens=3))
    while rig.engine.has_work:
        rig.step()
        rig.engine.check_integrity()
    rows = rig.runner.launched[0].rows
    assert set(rows[0].blocks).isdisjoint(rows[1].blocks)
    rig.check_idle()


def test_nothing_grows_with_the_number_of_requests_served() -> None:
    """Entry 27, for the engine: no container keeps a trace of a request that has ended."""
    rig = make_rig(True, num_blocks=20)

    def serve(count: int, round: int) -> int:
        for number in range(count):
            id = f"{round}.{number}"
            rig.engine.submit(make_request(id, 200 if number % 10 == 0 else (round, number, 3, 4, 5), max_tokens=1))
            if number % 10 == 1:
                rig.engine.cancel(id)
            rig.engine.step()
        while rig.engine.has_work:
            rig.engine.step()
        rig.engine.take_events()
        return _num_reachable_items(rig.engine)

    assert serve(100, 0) >= serve(400, 1)


def _num_reachable_items(root: object) -> int:
    """Add up the sizes of all containers that the engine reaches through its own objects."""
    seen: set[int] = set()
    total, todo = 0, [root]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, str | bytes):
            continue
        seen.add(id(item))
        if isinstance(item, dict | list | tuple | set | frozenset | deque):
            members = [*item.items()] if isinstance(item, dict) else [*item]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            total += len(members)  # pyright: ignore[reportUnknownArgumentType]
            todo += members
        elif type(item).__module__.startswith("baton.actors.engine"):
            names = [*getattr(item, "__slots__", ()), *getattr(item, "__dict__", ())]
            todo += [getattr(item, name) for name in names]
    return total
