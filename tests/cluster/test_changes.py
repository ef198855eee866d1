"""What is wanted becomes what is: scaling, draining, rolling restarts, role switches, back-off, a new controller."""

from __future__ import annotations

import asyncio

import pytest
from cluster_fakes import FakeClock, FakeLauncher, FakeWorker, MemoryStore

from baton.cluster.config import ClusterConfig
from baton.cluster.desired import Desired
from baton.cluster.errors import OperationRefusedError, ResourcesShortError
from baton.cluster.processes import Place
from baton.cluster.supervisor import Supervisor

CONFIG = ClusterConfig.model_validate(
    {
        "worker": {"model": "m.gguf", "served_name": "m"},
        "pools": {"prefill": {"replicas": 1}, "decode": {"replicas": 2}},
        "health": {"poll_s": 0.01, "silence_s": 5, "stop_timeout_s": 0.05, "stuck_s": 60, "backoff_max_s": 8},
        "router": {"drain_s": 0},
    }
)


class Cluster:
    def __init__(self, launcher: FakeLauncher | None = None, store: MemoryStore | None = None) -> None:
        self.clock = FakeClock()
        self.launcher = launcher or FakeLauncher()
        self.store = store or MemoryStore()
        self.supervisor = Supervisor(Desired.of(CONFIG), self.launcher, clock=self.clock, store=self.store)

    def worker(self, name: str) -> FakeWorker:
        return self.launcher.workers[name]

    def told(self) -> list[str]:
        return self.launcher.gateway.calls[-1]

    def want(self, desired: Desired) -> None:
        self.supervisor.desired = desired

    @property
    def desired(self) -> Desired:
        return self.supervisor.desired

    async def ticks(self, count: int = 6) -> None:
        for _ in range(count):
            await self.supervisor.tick()
            await asyncio.sleep(0)  # changes are tasks


@pytest.fixture
async def cluster() -> Cluster:
    cluster = Cluster()
    await cluster.supervisor.start()
    return cluster


async def test_a_larger_pool_gets_another_worker(cluster: Cluster) -> None:
    cluster.want(cluster.desired.scaled("decode", 3))
    assert not cluster.supervisor.is_settled()
    await cluster.ticks()
    assert cluster.told() == ["prefill-0/0", "decode-0/0", "decode-1/0", "decode-2/0"]
    assert cluster.supervisor.is_settled()


async def test_no_room_is_said_and_asked_for_again(cluster: Cluster) -> None:
    cluster.launcher.refusal = ResourcesShortError("1", "0", "add one")
    cluster.want(cluster.desired.scaled("decode", 3))
    await cluster.ticks()
    status = cluster.supervisor.statuses()[3]
    assert (status.name, status.state) == ("decode-2", "waiting") and "add one" in (status.failure or "")
    cluster.launcher.refusal = None
    cluster.clock.time_s += 10
    await cluster.ticks()
    assert cluster.supervisor.is_settled()


async def test_a_worker_is_drained_only_when_no_gateway_sends_it_work_and_stopped_only_then(cluster: Cluster) -> None:
    worker = cluster.worker("decode-1")
    cluster.want(cluster.desired.without("decode-1"))
    await cluster.ticks()
    assert cluster.told() == ["prefill-0/0", "decode-0/0"]
    assert worker.asked == ["drain"]
    assert cluster.supervisor.statuses()[2].state == "draining"
    worker.may_drain.set()
    await cluster.ticks()
    assert worker.asked == ["drain", "stop", "kill"]
    assert [status.name for status in cluster.supervisor.statuses()] == ["prefill-0", "decode-0", "gateway-0"]
    assert cluster.launcher.placed == {"prefill-0", "decode-0"}
    assert cluster.worker("prefill-0").heard == ["decode-1/0"]


async def test_a_rolling_restart_takes_one_worker_at_a_time(cluster: Cluster) -> None:
    cluster.want(cluster.desired.restarted(["prefill-0", "decode-0", "decode-1"]))
    for name in ("prefill-0", "decode-0", "decode-1"):
        await cluster.ticks()
        away = [worker.name for worker in cluster.launcher.workers.values() if worker.asked == ["drain"]]
        assert away == [name]
        cluster.worker(name).may_drain.set()
    await cluster.ticks()
    assert cluster.told() == ["prefill-0/1", "decode-0/1", "decode-1/1"]
    assert cluster.supervisor.is_settled()


async def test_gateways_know_that_a_replaced_or_dead_decode_worker_comes_back_unless_it_dies_again_and_again(
    cluster: Cluster,
) -> None:
    gateway = cluster.launcher.gateway
    cluster.want(cluster.desired.restarted(["decode-0"]))
    await cluster.ticks()
    assert gateway.is_decoder_coming
    cluster.worker("decode-0").may_drain.set()
    await cluster.ticks()
    assert not gateway.is_decoder_coming
    for is_promised in (True, True, False):
        cluster.worker("decode-1").die(certain=True)
        await cluster.ticks(1)
        assert gateway.is_decoder_coming is is_promised
        cluster.clock.time_s += 10
        await cluster.ticks(2)
    cluster.worker("prefill-0").die(certain=False)
    await cluster.ticks(1)
    assert not gateway.is_decoder_coming


async def test_a_rolling_restart_waits_while_another_worker_is_down(cluster: Cluster) -> None:
    cluster.worker("decode-1").die(certain=False)
    await cluster.ticks(1)
    cluster.want(cluster.desired.restarted(["decode-0"]))
    await cluster.ticks()
    assert cluster.worker("decode-0").asked == []


async def test_only_what_a_new_configuration_changes_is_started_anew(cluster: Cluster) -> None:
    tree = CONFIG.model_dump()
    tree["pools"]["prefill"]["worker"]["engine"]["max_num_seqs"] = 3
    cluster.want(cluster.desired.applied(ClusterConfig.model_validate(tree)))
    cluster.worker("prefill-0").may_drain.set()
    await cluster.ticks(8)
    assert cluster.told() == ["prefill-0/1", "decode-0/0", "decode-1/0"]
    spec = cluster.worker("prefill-0").spec
    assert spec is not None and spec.config.engine.max_num_seqs == 3


async def test_a_role_switch_restarts_nothing_and_is_told_at_once(cluster: Cluster) -> None:
    cluster.want(cluster.desired.with_role("decode-1", "prefill"))
    await cluster.ticks(2)
    roles = {info.peer.worker_id: info.role for info in cluster.supervisor.workers()}
    assert roles == {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "prefill"}
    assert cluster.worker("decode-1").asked == []
    assert cluster.supervisor.is_settled()
    assert cluster.supervisor.statuses()[2].role == "prefill"


async def test_a_worker_that_dies_again_and_again_is_started_less_and_less_often(cluster: Cluster) -> None:
    waits: list[float] = []
    for _ in range(7):
        cluster.worker("decode-0").die(certain=True)
        before = len(cluster.launcher.launched)
        start_s = cluster.clock.time_s
        while len(cluster.launcher.launched) == before:
            await cluster.ticks(1)
            cluster.clock.time_s += 0.5
        waits.append(cluster.clock.time_s - 0.5 - start_s)
        await cluster.ticks(1)
    assert waits == pytest.approx([0, 1, 2, 4, 8, 8, 8], abs=0.6)
    assert cluster.supervisor.statuses()[1].num_restarts == 7


async def test_a_worker_that_has_served_for_long_is_forgiven(cluster: Cluster) -> None:
    for _ in range(3):
        cluster.worker("decode-0").die(certain=True)
        await cluster.ticks(1)
        cluster.clock.time_s += 10
        await cluster.ticks(2)
    cluster.clock.time_s += 61
    await cluster.ticks(1)
    cluster.worker("decode-0").die(certain=True)
    await cluster.ticks(2)
    assert cluster.told()[1] == "decode-0/4"


async def test_a_worker_that_hangs_in_a_step_is_killed_although_it_answers(cluster: Cluster) -> None:
    stuck = cluster.worker("decode-0")
    stuck.busy_s = 61
    await cluster.ticks()
    assert stuck.asked == ["kill"]
    assert cluster.told() == ["prefill-0/0", "decode-0/1", "decode-1/0"]
    assert cluster.worker("prefill-0").heard == ["decode-0/0"]


async def test_a_worker_that_answers_nothing_is_killed_in_the_end(cluster: Cluster) -> None:
    silent = cluster.worker("decode-0")
    silent.hangs = True
    await cluster.ticks(1)
    cluster.clock.time_s += 61
    await cluster.ticks()
    assert silent.asked == ["kill"]
    assert "decode-0/1" in cluster.told()


async def test_a_start_that_fails_later_is_tried_again_in_another_process(cluster: Cluster) -> None:
    broken = cluster.launcher.prepare(FakeWorker("decode-0", "decode", failure="OutOfMemoryError"))
    cluster.worker("decode-0").die(certain=True)
    await cluster.ticks(1)
    cluster.clock.time_s += 2
    await cluster.ticks()
    assert broken.asked == ["kill"]
    cluster.clock.time_s += 2
    await cluster.ticks()
    assert cluster.told() == ["prefill-0/0", "decode-0/2", "decode-1/0"]


ECC = "AcceleratorError: CUDA error: uncorrectable ECC error encountered"


def place(node: str, *devices: str) -> Place:
    return Place(node_id=node, host="10.0.0.1", devices=devices)


async def test_a_device_that_fails_is_left_at_once_and_for_good(cluster: Cluster) -> None:
    worker = cluster.worker("decode-0")
    worker.place, worker.failure, worker.is_serving = place("n1", "3"), ECC, True
    await cluster.ticks()
    assert worker.asked == ["kill"]
    (bad,) = cluster.desired.quarantine
    assert (bad.name, bad.worker_id, bad.why) == ("n1/gpu3", "decode-0", ECC)
    assert cluster.launcher.kept == ["n1/gpu3"]
    assert cluster.told() == ["prefill-0/0", "decode-0/1", "decode-1/0"]
    assert cluster.worker("prefill-0").heard == ["decode-0/0"]
    after = await follower(cluster)
    await after.ticks()
    assert after.launcher.kept == ["n1/gpu3"]
    after.want(after.desired.released("n1/gpu3"))
    await after.ticks(1)
    assert after.launcher.kept == []
    with pytest.raises(OperationRefusedError, match="'n1/gpu3' is not in quarantine; nothing is"):
        after.desired.released("n1/gpu3")


async def fail_to_start(cluster: Cluster, name: str, times: int, where: Place) -> None:
    cluster.worker(name).die(certain=True)
    for _ in range(times):
        broken = cluster.launcher.prepare(FakeWorker(name, "decode", failure="RuntimeError: no", place=where))
        while broken.asked != ["kill"]:
            await cluster.ticks(1)
            cluster.clock.time_s += 10


async def test_a_place_where_starts_fail_again_and_again_is_left(cluster: Cluster) -> None:
    cluster.worker("decode-1").place = place("n2")
    await cluster.ticks(1)
    await fail_to_start(cluster, "decode-0", 2, place("n1"))
    assert not cluster.desired.quarantine
    await fail_to_start(cluster, "decode-0", 1, place("n1"))
    (bad,) = cluster.desired.quarantine
    assert (bad.name, bad.why) == ("n1", "failed 3 times in a row here: RuntimeError: no")
    cluster.clock.time_s += 10
    await cluster.ticks()
    assert cluster.supervisor.is_settled()


async def test_settings_with_which_nobody_starts_put_no_place_into_quarantine(cluster: Cluster) -> None:
    for name in ("prefill-0", "decode-1"):
        cluster.worker(name).die(certain=False)
    await fail_to_start(cluster, "decode-0", 4, place("n1"))
    assert not cluster.desired.quarantine


async def test_a_place_whose_node_has_left_is_forgotten(cluster: Cluster) -> None:
    worker = cluster.worker("decode-0")
    worker.place, worker.failure, worker.is_serving = place("n1", "3"), ECC, True
    await cluster.ticks()
    cluster.launcher.gone_nodes.add("n1")
    await cluster.ticks(1)
    assert not cluster.desired.quarantine and cluster.launcher.kept == []


# A controller that follows another.


async def follower(before: Cluster) -> Cluster:
    after = Cluster(before.launcher, before.store)
    assert after.supervisor.resume()
    return after


async def test_a_new_controller_finds_everybody_and_starts_nobody(cluster: Cluster) -> None:
    launched = list(cluster.launcher.launched)
    after = await follower(cluster)
    await after.ticks()
    assert after.launcher.launched == launched
    assert after.told() == ["prefill-0/0", "decode-0/0", "decode-1/0"]
    assert after.supervisor.is_settled()


async def test_a_new_controller_tells_nothing_until_it_has_heard_everybody(cluster: Cluster) -> None:
    """Or the gateway would let go of workers that serve."""
    cluster.worker("decode-1").hangs = True
    after = await follower(cluster)
    num_calls = len(after.launcher.gateway.calls)
    await after.ticks()
    assert len(after.launcher.gateway.calls) == num_calls


async def test_a_new_controller_remembers_what_was_wanted(cluster: Cluster) -> None:
    cluster.want(cluster.desired.scaled("decode", 3).with_role("decode-1", "prefill"))
    await cluster.ticks()
    after = await follower(cluster)
    await after.ticks()
    assert after.supervisor.is_settled()
    roles = {status.name: status.role for status in after.supervisor.statuses() if status.kind == "worker"}
    assert roles == {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "prefill", "decode-2": "decode"}


async def test_a_death_between_two_controllers_is_told_and_mended(cluster: Cluster) -> None:
    cluster.worker("decode-0").die(certain=True)
    after = await follower(cluster)
    await after.ticks()
    assert after.worker("prefill-0").heard == after.worker("decode-1").heard == ["decode-0/0"]
    assert "decode-0/1" in after.told()


async def test_a_drain_that_the_controller_did_not_live_to_end_is_ended_by_the_next(cluster: Cluster) -> None:
    cluster.want(cluster.desired.without("decode-1"))
    await cluster.ticks()
    after = await follower(cluster)
    after.worker("decode-1").may_drain.set()
    await after.ticks()
    assert after.worker("decode-1").asked[-1] == "kill"
    assert [status.name for status in after.supervisor.statuses()] == ["prefill-0", "decode-0", "gateway-0"]


async def test_only_changes_are_stored_and_the_end_leaves_nothing(cluster: Cluster) -> None:
    num_saves = cluster.store.num_saves
    await cluster.ticks()
    assert cluster.store.num_saves == num_saves
    await cluster.supervisor.stop()
    assert cluster.store.state is None
