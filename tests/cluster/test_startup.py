from __future__ import annotations

import asyncio

from baton.cluster.processes import Life
from baton.cluster.startup import Startup


class Start:
    """A start that ends when the test says how."""

    def __init__(self) -> None:
        self.outcomes: list[asyncio.Future[str]] = []

    async def __call__(self) -> str:
        self.outcomes.append(asyncio.get_running_loop().create_future())
        return await self.outcomes[-1]


async def probe_after(startup: Startup[str]) -> Life[str]:
    for _ in range(3):
        await asyncio.sleep(0)
    return startup.probe()


async def test_the_first_probe_begins_the_start_and_later_ones_do_not() -> None:
    start = Start()
    startup = Startup(start)
    assert start.outcomes == []
    assert startup.probe().ready is None
    assert (await probe_after(startup)).failure is None
    assert len(start.outcomes) == 1
    start.outcomes[0].set_result("address")
    assert (await probe_after(startup)).ready == "address"
    assert startup.probe().ready == "address"


async def test_a_failed_start_stays_failed() -> None:
    start = Start()
    startup = Startup(start)
    startup.probe()
    await asyncio.sleep(0)
    start.outcomes[0].set_exception(ValueError("num_blocks is 0"))
    assert (await probe_after(startup)).failure == "ValueError: num_blocks is 0"
    assert (await probe_after(startup)).failure == "ValueError: num_blocks is 0"
    assert len(start.outcomes) == 1


async def test_a_cancelled_start_has_ended_when_cancel_returns() -> None:
    start = Start()
    startup = Startup(start)
    startup.probe()
    await asyncio.sleep(0)
    await startup.cancel()
    assert start.outcomes[0].cancelled()
