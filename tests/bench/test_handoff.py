"""The benchmark runs here as it does on a GPU: what it prints there is worth believing only if its sums add up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from handoff import SHAPES, Load, bench, busy_s, worker_config

from baton.actors.engine.config import EngineConfig


def test_time_under_several_writes_counts_once() -> None:
    assert busy_s([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0), (0.6, 0.7)]) == 3.0


@pytest.mark.slow
async def test_both_processes_notes_explain_every_request() -> None:
    shape = SHAPES["smollm2"]
    engine = EngineConfig(num_blocks=64, max_context=1000, max_num_seqs=8, export_chunk=48, export_last_chunk=16)
    config = worker_config(shape, "cpu", engine)
    loads = [Load(40, 1, 1), Load(192, 1, 1)]
    runs = await bench(replace(shape, engine=engine), config, config, loads)
    assert [(run.pools, run.load.prompt_len) for run in runs] == [
        ("fresh", 40), ("fresh", 192), ("churned", 40), ("churned", 192)
    ]  # fmt: skip
    for short, long in (runs[:2], runs[2:]):
        (short_one,), (long_one,) = short.requests, long.requests
        assert short_one.num_bytes * 40 == short_one.least_bytes * 48, "its last block is not full"
        assert long_one.num_bytes == long_one.least_bytes
        assert (short_one.num_writes, long_one.num_writes) == (1, 5)
        assert (short_one.hidden, long_one.hidden > 0) == (0.0, True)
        for one in (short_one, long_one):
            assert 0 < one.told < one.posted < one.arrived < one.landed < one.adopted < one.launched < one.sampled
            assert one.sampled < one.second_token
            assert one.token_gap < one.second_token
