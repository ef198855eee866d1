from __future__ import annotations

from pathlib import Path

import pytest

from baton.cluster.sim.trace import ID_TOKENS, Arrival, TraceError, ideal_hit_rate, read_trace, repeated, scaled, spread

DATA = Path(__file__).parents[2] / "data"


def test_mooncake_rows_become_arrivals_whose_equal_ids_are_equal_tokens() -> None:
    arrivals = read_trace(DATA / "mooncake_conversation.first120.jsonl")
    assert (len(arrivals), arrivals[0].prompt_len, arrivals[0].output_len) == (120, 6758, 500)
    first, second = arrivals[0].tokens(), arrivals[1].tokens()
    assert len(first) == 6758
    assert first[:ID_TOKENS] == second[:ID_TOKENS]
    assert not set(first[ID_TOKENS:]) & set(second[ID_TOKENS:])


def test_azure_prompts_share_nothing() -> None:
    arrivals = read_trace(DATA / "azure_code.first100.csv")
    assert (len(arrivals), arrivals[0].prompt_len, arrivals[0].output_len) == (100, 4808, 10)
    assert arrivals[1].time_s == pytest.approx(0.052)
    assert ideal_hit_rate(arrivals, 16) == 0.0


def test_the_ideal_counts_whole_blocks_and_leaves_a_token_to_compute() -> None:
    twice = [Arrival(0.0, 1024, 1, (5, 6)), Arrival(1.0, 1024, 1, (5, 6))]
    assert ideal_hit_rate(twice, 512) == 512 / 2048
    assert ideal_hit_rate(twice, 16) == 1008 / 2048


def test_what_shares_a_timestamp_is_spread_up_to_the_next_one() -> None:
    arrivals = [Arrival(time, 1, 1, (i,)) for i, time in enumerate((0.0, 0.0, 0.0, 3.0, 6.0, 6.0))]
    assert [arrival.time_s for arrival in spread(arrivals)] == [0.0, 1.0, 2.0, 3.0, 6.0, 6.0]
    assert scaled(arrivals, 2.0)[3].time_s == 1.5


def test_a_repeated_trace_goes_on_with_other_content_but_for_the_block_that_all_share() -> None:
    arrivals = [Arrival(0.0, 1024, 1, (0, 1)), Arrival(2.0, 1024, 1, (0, 2))]
    longer = repeated(arrivals, 4)
    assert [arrival.time_s for arrival in longer] == [0.0, 2.0, 4.0, 6.0]
    assert [arrival.ids for arrival in longer] == [(0, 1), (0, 2), (0, 4), (0, 5)]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.txt", "", r"must end in one of \.jsonl, \.csv"),
        ("a.jsonl", "", "holds no request"),
        ("a.jsonl", '{"timestamp":0}\n', "line 1"),
        ("a.jsonl", '{"timestamp":0,"input_length":600,"output_length":1,"hash_ids":[1]}\n', "one hash_id per 512"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "line 2: needs TIMESTAMP"),
    ],
)
def test_a_trace_that_cannot_be_read_is_refused_with_the_line(tmp_path: Path, name: str, text: str, said: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(TraceError, match=said):
        read_trace(path)


def test_a_trace_that_is_not_there_is_an_error() -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(Path("nowhere.jsonl.gz"))
