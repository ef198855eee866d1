"""Real Ray, tiny actors: placement, restart after a kill, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.cloudpickle
import tiny_processes
from cluster_fakes import until_gone
from tiny_processes import TinyGateway, TinyWorker

from baton.cluster.config import ClusterConfig
from baton.cluster.desired import Desired
from baton.cluster.errors import ResourcesShortError, StartError
from baton.cluster.ray_launcher import RayLauncher
from baton.cluster.supervisor import Supervisor, supervised

pytestmark = pytest.mark.usefixtures("shared_ray")


ray.cloudpickle.register_pickle_by_value(tiny_processes)  # actors do not find this folder


def config(model: str = "tiny", **changes: Any) -> ClusterConfig:
    tree = {
        "worker": {"model": model, "served_name": "m"},
        "pools": {"prefill": {"num_cpus": 1}, "decode": {"num_cpus": 2}},
        "health": {"poll_s": 0.1, "silence_s": 5},
        "ray": {"placement_timeout_s": 0.3},
    }
    return ClusterConfig.model_validate(tree | changes)


def supervisor(settings: ClusterConfig) -> Supervisor:
    return Supervisor(Desired.of(settings), RayLauncher(settings, worker=TinyWorker, gateway=TinyGateway))


async def until_free(num_cpus: float) -> None:
    """Wait until Ray has taken its reservations back; it does so a moment after it was told."""
    async with asyncio.timeout(10):
        while ray.available_resources().get("CPU", 0.0) != num_cpus:
            await asyncio.sleep(0.05)


async def test_each_worker_gets_a_process_and_its_place_and_the_end_leaves_neither() -> None:
    running = supervisor(config())
    async with supervised(running) as address:
        pids = [int(address.removeprefix("pid:")), *(info.pid for info in running.workers())]
        assert len(set(pids)) == 3
        await until_free(8 - 3)
    await until_gone(pids)
    await until_free(8)


async def test_a_killed_worker_returns_as_another_life_and_its_peer_hears_of_the_death(tmp_path: Path) -> None:
    running = supervisor(config(model=str(tmp_path)))
    async with supervised(running):
        prefill, decode = running.workers()
        os.kill(prefill.pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            while len(lives := running.workers()) < 2 or lives[0].pid == prefill.pid:
                await asyncio.sleep(0.05)
        assert lives[0].peer.worker_id == "prefill-0"
        assert lives[0].peer.incarnation != prefill.peer.incarnation
        assert lives[1] == decode
        async with asyncio.timeout(5):
            while not (tmp_path / f"decode-0-heard-{prefill.peer.incarnation}").exists():
                await asyncio.sleep(0.05)


async def test_a_worker_that_cannot_go_on_gets_a_new_process() -> None:
    running = supervisor(config(model="fragile", pools={"both": {}}))
    async with supervised(running):
        (first,) = running.workers()
        await running.counts()
        async with asyncio.timeout(20):
            while not (lives := running.workers()) or lives[0].pid == first.pid:
                await asyncio.sleep(0.05)


async def test_a_gpu_that_fails_is_kept_from_use_until_it_is_released() -> None:
    running = supervisor(config(model="bad gpu 0", pools={"both": {"replicas": 2, "num_gpus": 1}}))
    async with supervised(running):
        await running.counts()
        async with asyncio.timeout(20):
            while not running.desired.quarantine:
                await asyncio.sleep(0.05)
        (bad,) = running.desired.quarantine
        assert bad.place.devices == ("0",) and "uncorrectable ECC" in bad.why
        await asyncio.sleep(1)
        (other,) = running.workers()
        left = next(status for status in running.statuses() if status.name == bad.worker_id)
        assert other.peer.worker_id != bad.worker_id and left.state == "waiting"
        assert "1 are in quarantine" in (left.failure or "")
        running.desired = running.desired.without(bad.worker_id).released(bad.name)
        async with asyncio.timeout(20):
            while ray.available_resources().get("GPU") != 1:
                await asyncio.sleep(0.05)
    await until_free(8)


async def test_a_worker_that_cannot_start_says_why_and_nothing_is_left() -> None:
    with pytest.raises(StartError, match="-0 did not start: ValueError: these weights are broken"):
        await supervisor(config(model="broken")).start()
    await until_free(8)


async def test_a_port_in_use_is_said_with_the_fix() -> None:
    with pytest.raises(StartError, match=r"port 80 of 127\.0\.0\.1 is in use; set router\.port"):
        await supervisor(config(router={"port": 80})).start()
    await until_free(8)


async def test_more_than_the_cluster_has_is_refused_at_once() -> None:
    with pytest.raises(ResourcesShortError, match=r"wanted 3 x \(4 CPU\); present 1 node of 8 CPU"):
        await supervisor(config(pools={"both": {"replicas": 3, "num_cpus": 4}})).start()
    await until_free(8)


async def test_what_others_hold_is_waited_for_until_the_deadline_and_nothing_stays_reserved() -> None:
    async with supervised(supervisor(config())):
        with pytest.raises(ResourcesShortError, match="but 1 not placed with 2 CPU \\+ 2 GPU free"):
            await supervisor(config(pools={"both": {"replicas": 2, "num_cpus": 3}})).start()
        await until_free(8 - 3)
