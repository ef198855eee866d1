"""Greedy tokens equal transformers' `generate` where one worker prefills and another decodes, over NIXL."""

from __future__ import annotations

import pytest
from exactness import check_alone, check_cold_and_warm, check_preempted, pair
from worker_client import Client, settled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("collected")]


@pytest.mark.parametrize("chunk", [16, 256, 4096])
async def test_greedy_tokens_equal_transformers(chunk: int) -> None:
    await check_cold_and_warm(chunk, handed_over=True)


async def test_greedy_tokens_equal_transformers_under_preemption() -> None:
    await check_preempted(handed_over=True)


@pytest.mark.parametrize("block_sizes", [(16, 32), (32, 16)])
async def test_greedy_tokens_equal_transformers_across_block_sizes(block_sizes: tuple[int, int]) -> None:
    async with pair(256, 12_800, block_sizes) as (p, d):
        async with Client(d.info().peer.address) as client:
            await check_alone(client, p.info().peer, "alone")
        await settled(p)
        await settled(d)
