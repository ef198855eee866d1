"""Public bug reports on disaggregation and cancellation, replayed between processes; numbers as in bug-reports.md."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from signal import SIGKILL, SIGTERM

import pytest

from baton.actors.engine.request import Request
from baton.actors.messages import WorkerInfo
from tests.chaos import control
from tests.chaos.gates import GateSpec
from tests.chaos.gateway import Gateway
from tests.chaos.processes import WorkerProcess
from tests.chaos.world import EXIT_S, World, is_right, new_request

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]


class Asked:
    """One request under way, from P to D unless told otherwise."""

    def __init__(self, world: World, gateway: Gateway, request: Request, decodes: tuple[WorkerInfo, ...] = ()) -> None:
        self.request = request
        self.gateway = gateway
        prefill = world.workers["P"].info.peer
        work = gateway.generate(request, prefill, decodes or (world.workers["D"].info,))
        self.answer = asyncio.create_task(work)

    async def right(self) -> None:
        async with asyncio.timeout(5):
            answered = await self.answer
        assert is_right(self.request, answered), answered

    def leave(self) -> None:
        self.gateway.cancel(self.request.id)
        self.answer.cancel()


@asynccontextmanager
async def held(worker: WorkerProcess, request: Request, point: str, nth: int = 1) -> AsyncIterator[None]:
    """Inside, the request is about to pass the point."""
    worker.say(GateSpec(point, request.id, "hold", nth))
    yield
    worker.say(control.OpenGates())


async def reached(worker: WorkerProcess) -> None:
    async with asyncio.timeout(5):
        await worker.reached.get()


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    gateway = Gateway()
    yield gateway
    await gateway.close()


async def all_whole(world: World) -> None:
    assert await world.whole() == []


async def test_clients_that_leave_between_prefill_and_decode_cost_prefill_nothing(
    world: World, gateway: Gateway
) -> None:
    """Entry 15: 200 in a row, on a pool that fits 10; no lease may be what frees them."""
    begun = time.monotonic()
    p = world.workers["P"]
    for _ in range(200):
        leaving = Asked(world, gateway, request := new_request(45, 24))
        async with held(p, request, "says.Prefilled"):
            await reached(p)
            leaving.leave()
    assert time.monotonic() - begun < 20, "somebody waited for leases of 1 s"
    await Asked(world, gateway, new_request(45, 24)).right()
    await all_whole(world)


async def test_a_request_that_decode_refuses_never_reaches_prefill(world: World, gateway: Gateway) -> None:
    """Entry 15, variant: decode answers with an error."""
    too_long = new_request(400, 4)
    async with asyncio.timeout(5):
        answered = await Asked(world, gateway, too_long).answer
    assert answered.finish == "error" and "shorten the prompt" in (answered.error or "")
    await all_whole(world)


async def test_blocks_of_an_aborted_hand_over_are_given_to_nobody_while_they_may_be_written(
    world: World, gateway: Gateway
) -> None:
    """Entry 16: A takes most of D, is aborted in mid transfer, and B needs its blocks at once."""
    p, d = world.workers["P"], world.workers["D"]
    a = Asked(world, gateway, new_request(4 * 53, 10))
    async with held(p, a.request, "write", nth=3):
        await reached(p)
        a.leave()
        b_request = new_request(80, 8)
        b = asyncio.create_task(gateway.generate(b_request, None, [d.info]))
        await asyncio.wait([b], timeout=0.4)
        assert not b.done(), "B has blocks into which a write of A is still to come"
        assert (await d.state()).num_quarantined == 1
    async with asyncio.timeout(5):
        assert is_right(b_request, await b)
    await all_whole(world)


async def test_prefill_workers_that_die_in_mid_transfer_leave_decode_whole_each_time(
    world: World, gateway: Gateway
) -> None:
    """Entry 17: before the first byte and after half of them; a completion notice never comes."""
    for nth in (1, 4, 1, 4):
        p = world.workers["P"]
        request = new_request(45, 24)
        p.say(GateSpec("write", request.id, "hold", nth))
        asked = Asked(world, gateway, request)
        await reached(p)
        p.signal(SIGKILL)
        await p.join(EXIT_S)
        await world.repair()
        await asked.right()
        await all_whole(world)


async def test_writes_that_cannot_be_posted_leave_both_sides_whole(world: World, gateway: Gateway) -> None:
    """Entry 17, variant: write k of n fails, 40 times over, for aborted requests and others."""
    for number in range(40):
        request = new_request(45, 8)
        world.workers["P"].say(GateSpec("write", request.id, "break", 1 + number % 6))
        asked = Asked(world, gateway, request)
        await reached(world.workers["P"])
        if number % 4 == 0:
            asked.leave()
            await all_whole(world)  # the next one must not be sent on the stream that this failure ends
        else:
            await asked.right()
        await all_whole(world)  # which takes a new stream: see PrefillRole._hang_up


async def test_prefill_restarted_at_its_address_is_another_peer_and_decode_stays_healthy(
    world: World, gateway: Gateway
) -> None:
    """Entry 18: same host and port, same prompt; decode's answers to health checks never fail meanwhile."""
    d, request = world.workers["D"], new_request(45, 24)
    await Asked(world, gateway, request).right()
    world.workers["P"].signal(SIGKILL)
    restart = asyncio.create_task(world.restart_in_place("P"))
    while not restart.done():
        await d.state()
        await asyncio.sleep(0.05)
    before = world.workers["P"].info.peer
    other = new_request(45, 24)
    asked = Asked(world, gateway, other)
    async with asyncio.timeout(5):
        answered = await asked.answer
    assert is_right(other, answered) and answered.prefill_worker == "P", "the new life was not used"
    assert world.workers["P"].info.peer == before and d.is_alive
    await all_whole(world)


@pytest.mark.parametrize("signal", [SIGKILL, SIGTERM])
@pytest.mark.parametrize("has_spare", [True, False])
async def test_a_stream_cut_by_the_death_of_its_decode_worker_goes_on_or_ends_with_an_error(
    signal: int, has_spare: bool, world: World, gateway: Gateway
) -> None:
    """Entry 19: with a spare worker the text is whole and none twice; with none it never ends as if it were."""
    d, spare = world.workers["D"], world.workers["spare"]
    request, elsewhere = new_request(45, 64), new_request(30, 64)
    decodes = (d.info, spare.info) if has_spare else (d.info,)
    other = Asked(world, gateway, elsewhere, (spare.info,))
    asked = Asked(world, gateway, request, decodes)
    async with held(d, request, "says.Frame", nth=6):
        await reached(d)
        d.signal(SIGKILL if signal == SIGKILL else SIGTERM)
    async with asyncio.timeout(5):
        answered = await asked.answer
    await d.join(EXIT_S)
    if has_spare or signal == SIGTERM:  # one that is terminated ends what it has begun
        assert is_right(request, answered), answered
    else:
        assert answered.finish == "error" and answered.error
    await other.right()
    await world.repair()
    await all_whole(world)


@pytest.mark.parametrize("num_prompt", [1, 15, 16, 17, 31, 32, 33, 100])
async def test_a_block_size_that_cannot_be_recut_is_refused_and_the_answer_is_right(
    num_prompt: int, world: World, gateway: Gateway
) -> None:
    """Entry 20: the error reaches decode at once, which goes on alone; nothing dies deep in a transfer thread."""
    if "P6" not in world.workers:
        await world.start("P6", block_size=6)
    request = new_request(num_prompt, 8)
    work = gateway.generate(request, world.workers["P6"].info.peer, [world.workers["D"].info])
    async with asyncio.timeout(2):
        answered = await work
    assert is_right(request, answered) and answered.prefill_worker == "D"
    await all_whole(world)


async def test_a_worker_whose_engine_hangs_is_left_by_peers_and_clients(world: World, gateway: Gateway) -> None:
    """Of the kind of entry 17: the process lives, its loop answers, and nothing gets on."""
    p, d, spare = (world.workers[name] for name in ("P", "D", "spare"))
    p.say(control.HangEngine())
    await Asked(world, gateway, new_request(45, 24)).right()
    d.say(control.HangEngine())
    request = new_request(45, 24)
    async with asyncio.timeout(5):
        answered = await gateway.generate(request, None, (d.info, spare.info))
    assert is_right(request, answered) and answered.decode_worker == "spare"
    for worker in (p, d):
        worker.signal(SIGTERM)
        await worker.join(2 * EXIT_S)
        assert not worker.is_alive, "a hung engine kept a terminated process"
    await world.repair()
    await all_whole(world)
