"""Greedy tokens equal transformers' `generate` on the same float32 weights, however a worker cuts the work up.

Compared for 20 prompts: in chunks of 16, of 256 and whole, with a cold and a warm cache, alone and among 7 neighbours,
and under preemption. `test_exactness_handed_over.py` does the same with prompts that another worker has prefilled.
"""

from __future__ import annotations

import pytest
from exactness import check_cold_and_warm, check_preempted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("collected")]


@pytest.mark.parametrize("chunk", [16, 256, 4096])
async def test_greedy_tokens_equal_transformers(chunk: int) -> None:
    await check_cold_and_warm(chunk, handed_over=False)


async def test_greedy_tokens_equal_transformers_under_preemption() -> None:
    await check_preempted(handed_over=False)
