from __future__ import annotations

import asyncio

import pytest
from cluster_fakes import FakeClock, FakeLauncher, FakeWorker

from baton.cluster.config import ClusterConfig
from baton.cluster.desired import Desired
from baton.cluster.errors import ResourcesShortError, StartError
from baton.cluster.supervisor import Supervisor, supervised
from baton.cluster.watched import ProcessStatus

CONFIG = ClusterConfig.model_validate(
    {
        "worker": {"model": "m.gguf", "served_name": "m"},
        "pools": {"prefill": {"replicas": 1}, "decode": {"replicas": 2}},
        "health": {"poll_s": 0.01, "silence_s": 5, "stop_timeout_s": 0.05},
        "router": {"drain_s": 0},
        "ray": {"start_timeout_s": 60},
    }
)
EVERYONE = ["prefill-0/0", "decode-0/0", "decode-1/0"]


class Cluster:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.launcher = FakeLauncher()
        self.reports: list[tuple[ProcessStatus, ...]] = []
        self.supervisor = Supervisor(Desired.of(CONFIG), self.launcher, clock=self.clock, on_change=self.reports.append)

    def worker(self, name: str) -> FakeWorker:
        return self.launcher.workers[name]

    def told(self) -> list[str]:
        """What the gateway was told last."""
        return self.launcher.gateway.calls[-1]


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


async def test_start_returns_when_the_gateway_knows_every_worker(cluster: Cluster) -> None:
    assert await cluster.supervisor.start() == "http://127.0.0.1:8000"
    assert cluster.told() == EVERYONE


async def test_start_waits_for_the_slowest_worker(cluster: Cluster) -> None:
    slow = cluster.launcher.prepare(FakeWorker("decode-1", "decode", loading=True))
    start = asyncio.create_task(cluster.supervisor.start())
    while cluster.launcher.gateway.calls != [EVERYONE[:2]]:
        await asyncio.sleep(0)
    assert not start.done()
    slow.loading = False
    await start
    assert cluster.told() == EVERYONE


async def test_start_waits_until_the_gateway_can_reach_them(cluster: Cluster) -> None:
    cluster.launcher.gateway.num_polls_to_connect = 3
    await cluster.supervisor.start()
    assert cluster.launcher.gateway.num_polls_to_connect == -1


async def test_start_fails_with_the_workers_own_words_and_leaves_nothing(cluster: Cluster) -> None:
    cluster.launcher.prepare(FakeWorker("decode-0", "decode", failure="OutOfMemoryError: 3 GiB short"))
    with pytest.raises(StartError, match="decode-0 did not start: OutOfMemoryError: 3 GiB short"):
        await cluster.supervisor.start()
    assert cluster.launcher.is_closed
    assert cluster.worker("prefill-0").asked == ["stop"]


async def test_start_fails_when_a_process_dies_in_it(cluster: Cluster) -> None:
    cluster.launcher.prepare(FakeWorker("decode-0", "decode")).die(certain=False)
    with pytest.raises(StartError, match="decode-0 did not start: decode-0 cannot be reached: signal 9"):
        await cluster.supervisor.start()
    assert cluster.launcher.is_closed


async def test_start_fails_when_the_gateway_does(cluster: Cluster) -> None:
    cluster.launcher.gateway.failure = "StartError: port 80 is in use"
    with pytest.raises(StartError, match="gateway-0 did not start: StartError: port 80"):
        await cluster.supervisor.start()
    assert cluster.launcher.is_closed


async def test_start_ends_at_its_deadline_and_names_who_is_late(cluster: Cluster) -> None:
    cluster.launcher.prepare(FakeWorker("decode-1", "decode", loading=True))
    with pytest.raises(StartError, match="decode-1 did not start: not ready after 60 s"):
        await cluster.supervisor.start()
    assert cluster.launcher.is_closed


async def test_refused_placement_closes_the_launcher(cluster: Cluster) -> None:
    cluster.launcher.refusal = ResourcesShortError("3", "2", "add one")
    with pytest.raises(ResourcesShortError):
        await cluster.supervisor.start()
    assert cluster.launcher.is_closed
    assert cluster.launcher.workers == {}


async def test_a_cancelled_start_leaves_nothing(cluster: Cluster) -> None:
    cluster.launcher.prepare(FakeWorker("decode-1", "decode", hangs=True))
    start = asyncio.create_task(cluster.supervisor.start())
    await asyncio.sleep(0.03)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert cluster.launcher.is_closed


async def test_a_worker_that_may_be_dead_gets_no_requests_and_no_obituary(cluster: Cluster) -> None:
    await cluster.supervisor.start()
    cluster.worker("prefill-0").die(certain=False)
    await cluster.supervisor.tick()
    assert cluster.told() == EVERYONE[1:]
    assert cluster.worker("decode-0").heard == []


async def test_a_certain_death_is_told_to_every_peer_at_once(cluster: Cluster) -> None:
    await cluster.supervisor.start()
    cluster.worker("prefill-0").die(certain=True)
    await cluster.supervisor.tick()
    assert cluster.worker("decode-0").heard == cluster.worker("decode-1").heard == ["prefill-0/0"]


async def test_a_dead_worker_is_launched_anew_and_serves_under_its_new_incarnation(cluster: Cluster) -> None:
    await cluster.supervisor.start()
    cluster.worker("decode-0").die(certain=True)
    await cluster.supervisor.tick()
    assert cluster.told() == ["prefill-0/0", "decode-1/0"]
    assert cluster.worker("prefill-0").heard == cluster.worker("decode-1").heard == ["decode-0/0"]
    await cluster.supervisor.tick()
    assert cluster.told() == ["prefill-0/0", "decode-0/1", "decode-1/0"]
    assert cluster.worker("decode-0").heard == []


async def test_one_out_of_reach_is_not_launched_twice(cluster: Cluster) -> None:
    await cluster.supervisor.start()
    cluster.worker("decode-0").die(certain=False)
    await cluster.supervisor.tick()
    cluster.worker("decode-0").lost = None
    await cluster.supervisor.tick()
    assert cluster.told() == EVERYONE
    assert cluster.launcher.launched.count("decode-0") == 1


async def test_an_obituary_waits_for_a_peer_that_cannot_be_reached(cluster: Cluster) -> None:
    await cluster.supervisor.start()
    peer = cluster.worker("decode-0")
    peer.die(certain=False)
    cluster.worker("prefill-0").die(certain=True)
    await cluster.supervisor.tick()
    assert peer.heard == []
    peer.lost = None  # the same life answers again
    await cluster.supervisor.tick()
    await cluster.supervisor.tick()
    assert peer.heard == ["prefill-0/0"]


async def test_a_new_process_is_not_told_of_those_it_never_met(cluster: Cluster) -> None:
    await cluster.supervisor.start()
    cluster.worker("prefill-0").die(certain=True)
    cluster.worker("decode-0").die(certain=True)
    await cluster.supervisor.tick()
    await cluster.supervisor.tick()
    assert cluster.worker("decode-0").heard == cluster.worker("prefill-0").heard == []
    assert cluster.worker("decode-1").heard == ["decode-0/0", "prefill-0/0"]


async def test_silence_is_borne_until_its_limit_and_is_no_death(cluster: Cluster) -> None:
    await cluster.supervisor.start()
    cluster.worker("decode-0").hangs = True
    await cluster.supervisor.tick()
    assert cluster.told() == EVERYONE
    cluster.clock.time_s += 5.1
    await cluster.supervisor.tick()
    assert cluster.told() == ["prefill-0/0", "decode-1/0"]
    assert cluster.worker("prefill-0").heard == []
    await cluster.supervisor.stop()


async def test_a_lost_call_to_the_gateway_is_made_again(cluster: Cluster) -> None:
    await cluster.supervisor.start()
    cluster.launcher.gateway.refusals = 1
    cluster.worker("decode-1").die(certain=False)
    await cluster.supervisor.tick()
    assert cluster.told() == EVERYONE
    await cluster.supervisor.tick()
    assert cluster.told() == EVERYONE[:2]


async def test_a_dead_gateway_is_launched_anew_and_told_everything_again(cluster: Cluster) -> None:
    await cluster.supervisor.start()
    num_calls = len(cluster.launcher.gateway.calls)
    await cluster.supervisor.tick()
    assert len(cluster.launcher.gateway.calls) == num_calls
    await cluster.launcher.gateway.kill()
    await cluster.supervisor.tick()
    await cluster.supervisor.tick()
    assert cluster.launcher.launched.count("gateway-0") == 2
    assert cluster.launcher.gateway.calls[num_calls:] == [EVERYONE]


async def test_changes_are_reported_once(cluster: Cluster) -> None:
    await cluster.supervisor.start()
    cluster.reports.clear()
    cluster.worker("decode-0").die(certain=False)
    for _ in range(3):
        await cluster.supervisor.tick()
    assert [next(s.state for s in report if s.name == "decode-0") for report in cluster.reports] == ["lost"]


async def test_one_failed_round_does_not_end_the_watch(cluster: Cluster) -> None:
    await cluster.supervisor.start()
    worker = cluster.worker("decode-0")
    broken, worker.peer_dead = worker.peer_dead, None  # type: ignore[assignment]
    cluster.worker("prefill-0").die(certain=True)
    watch = asyncio.create_task(cluster.supervisor.run())
    await asyncio.sleep(0.02)
    worker.peer_dead = broken  # type: ignore[method-assign]
    while worker.heard != ["prefill-0/0"]:
        await asyncio.sleep(0.001)
    watch.cancel()


async def test_the_end_of_the_block_stops_everything_even_if_one_worker_hangs(cluster: Cluster) -> None:
    async with supervised(cluster.supervisor):
        cluster.worker("decode-0").hangs = True
    assert cluster.launcher.gateway.stopped
    assert cluster.worker("prefill-0").asked == ["stop"]
    assert cluster.worker("decode-1").asked == ["stop"]
    assert cluster.launcher.is_closed


async def test_counts_come_from_every_worker_that_serves(cluster: Cluster) -> None:
    await cluster.supervisor.start()
    cluster.worker("decode-1").die(certain=False)
    await cluster.supervisor.tick()
    counts = await cluster.supervisor.counts()
    assert {name: count.held for name, count in counts.items()} == {"prefill-0": 0, "decode-0": 0}
