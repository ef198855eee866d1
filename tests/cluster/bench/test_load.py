from __future__ import annotations

from pathlib import Path

import pytest

from baton.cluster.bench.load import Lengths, Scale, Tokens, arrival_times, made_up_jobs, trace_jobs

TOKENS = Tokens(1000, 30_000)

MOONCAKE = """\
{"timestamp":0,"input_length":1100,"output_length":40,"hash_ids":[0,1,2]}
{"timestamp":0,"input_length":1500,"output_length":60,"hash_ids":[0,1,3]}
{"timestamp":3000,"input_length":600,"output_length":1,"hash_ids":[0,4]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,100,10
2023-11-16 18:17:05.9799600,200,20
"""


def a_trace(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_equal_blocks_of_a_trace_are_equal_tokens_at_any_scale(tmp_path: Path) -> None:
    path = a_trace(tmp_path, "trace.jsonl", MOONCAKE)
    for scale in (1.0, 0.1):
        first, second, third = trace_jobs(path, Scale(prompt=scale), TOKENS, None)
        size = round(512 * scale)
        assert [len(job.prompt) for job in (first, second, third)] == [
            round(length * scale) for length in (1100, 1500, 600)
        ]
        assert first.prompt[: 2 * size] == second.prompt[: 2 * size]
        assert first.prompt[2 * size :] != second.prompt[2 * size : len(first.prompt)]
        assert third.prompt[:size] == first.prompt[:size]
        assert all(1000 <= token < 30_000 for token in first.prompt)


def test_a_trace_is_scaled_and_cut(tmp_path: Path) -> None:
    path = a_trace(tmp_path, "trace.jsonl", MOONCAKE)
    jobs = trace_jobs(path, Scale(speed=2.0, output=0.5, max_prompt=1000, max_output=25), TOKENS, None)
    assert [job.time_s for job in jobs] == [0.0, 0.75, 1.5]  # those of one tick are spread over it
    assert [job.output_len for job in jobs] == [20, 25, 1]
    assert [len(job.prompt) for job in jobs] == [1000, 1000, 600]


def test_a_trace_is_repeated_with_other_content(tmp_path: Path) -> None:
    jobs = trace_jobs(a_trace(tmp_path, "azure.csv", AZURE), Scale(), TOKENS, 5)
    assert [len(job.prompt) for job in jobs] == [100, 200, 100, 200, 100]
    assert len({job.prompt for job in jobs}) == 5
    assert [job.time_s for job in jobs] == sorted(job.time_s for job in jobs)


@pytest.mark.parametrize("is_poisson", [False, True])
def test_arrivals_have_the_rate_that_was_asked_for(is_poisson: bool) -> None:
    times = arrival_times(50.0, 100.0, is_poisson=is_poisson)
    assert len(times) == pytest.approx(5000, rel=0.05)
    assert times == sorted(times) and times[-1] < 100.0


def test_made_up_lengths_have_the_mean_that_was_asked_for() -> None:
    times = [0.0] * 4000
    jobs = made_up_jobs(Lengths(prompt=100, output=50), Scale(), TOKENS, times)
    assert sum(len(job.prompt) for job in jobs) / 4000 == pytest.approx(100, rel=0.1)
    assert sum(job.output_len for job in jobs) / 4000 == pytest.approx(50, rel=0.1)
    assert {len(job.prompt) for job in made_up_jobs(Lengths(prompt=64, sigma=0), Scale(), TOKENS, times[:9])} == {64}
    assert len({job.prompt for job in jobs}) == 4000
