"""The detached controller on real Ray with tiny processes: what outlives what, and that the end leaves nothing."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import ray
import ray.cloudpickle
import tiny_processes
from cluster_fakes import until_gone
from tiny_processes import TinyGateway, TinyWorker

from baton.cluster.config import ClusterConfig
from baton.cluster.controller import ClusterStatus
from baton.cluster.controller_actor import find_controller
from baton.cluster.errors import ClusterError, OperationRefusedError
from baton.cluster.operate import Operator

pytestmark = [
    pytest.mark.usefixtures("shared_ray"),
    pytest.mark.timeout(120),
    pytest.mark.asyncio(loop_scope="module"),
]

ray.cloudpickle.register_pickle_by_value(tiny_processes)  # actors do not find this folder


def config(model: str, **changes: Any) -> ClusterConfig:
    tree = {
        "name": "tiny",
        "worker": {"model": model, "served_name": "m"},
        "pools": {"prefill": {"num_cpus": 1}, "decode": {"replicas": 2, "num_cpus": 1}},
        "health": {"poll_s": 0.1, "silence_s": 5, "drain_s": 1},
        "ray": {"placement_timeout_s": 1, "address": "auto"},
    }
    return ClusterConfig.model_validate(tree | changes)


async def up(settings: ClusterConfig) -> ClusterStatus:
    operator = Operator(settings.name)
    await operator.up(settings, worker=TinyWorker, gateway=TinyGateway)
    return await operator.until_settled(30)


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny workers leave word of the deaths they heard of."""
    return tmp_path_factory.mktemp("heard")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def running(shared_ray: None, heard: Path) -> AsyncGenerator[Operator]:
    await up(config(str(heard)))
    yield Operator("tiny")
    await Operator("tiny").down()


@pytest_asyncio.fixture(loop_scope="module")
async def operator(running: Operator, heard: Path) -> Operator:
    """The cluster as it was at first, whatever the test before has made of it."""
    await running.up(config(str(heard)))
    await running.until_settled(30)
    return running


def pids(status: ClusterStatus) -> dict[str, int]:
    return {process.name: process.pid for process in status.processes if process.pid is not None}


async def settled(operator: Operator) -> ClusterStatus:
    return await operator.until_settled(30)


async def test_workers_outlive_a_killed_controller_and_the_next_one_finds_them(operator: Operator) -> None:
    before = await operator.status()
    await operator.scale("decode", 3)
    scaled = await settled(operator)
    controller = find_controller("tiny")
    assert controller is not None
    ray.kill(controller, no_restart=False)
    after = await settled(operator)
    assert pids(after) == pids(scaled) and len(pids(after)) == len(pids(before)) + 1
    assert after.desired == {"prefill": 1, "decode": 3}


async def test_a_killed_worker_is_launched_anew_and_its_peers_hear_of_it(operator: Operator, heard: Path) -> None:
    before = pids(await operator.status())
    os.kill(before["decode-0"], signal.SIGKILL)
    async with asyncio.timeout(30):
        while (now := pids(await operator.status())).get("decode-0", before["decode-0"]) == before["decode-0"]:
            await asyncio.sleep(0.05)
    assert now["prefill-0"] == before["prefill-0"]
    await settled(operator)
    assert list(heard.glob("prefill-0-heard-*"))


async def test_pools_grow_shrink_switch_and_restart(operator: Operator) -> None:
    before = pids(await operator.status())
    await operator.switch_role("decode-1", "prefill")
    switched = await settled(operator)
    assert pids(switched) == before and switched.desired == {"prefill": 2, "decode": 1}
    await operator.restart(["prefill-0"])
    restarted = pids(await settled(operator))
    assert {name for name, pid in restarted.items() if pid != before[name]} == {"prefill-0"}
    await operator.drain("decode-1")
    drained = await settled(operator)
    assert set(pids(drained)) == {"prefill-0", "decode-0", "gateway-0"}
    await until_gone([before["prefill-0"], before["decode-1"]])
    with pytest.raises(OperationRefusedError, match="nobody to decode"):
        await operator.drain("decode-0")
    with pytest.raises(OperationRefusedError, match="there is no worker 'x'; there are prefill-0, decode-0"):
        await operator.restart(["x"])


async def test_prometheus_finds_every_process_at_the_controller(operator: Operator) -> None:
    status = await operator.status()
    async with httpx.AsyncClient(base_url=f"http://{status.controller}") as http:
        found = (await http.get("/targets")).json()
        assert {target["labels"]["process"] for target in found} == {
            "controller", "gateway-0", "prefill-0", "decode-0", "decode-1",
        }  # fmt: skip
        metrics = (await http.get("/metrics")).text
        assert 'baton_process_up{kind="worker",process="decode-1"} 1.0' in metrics
        assert (await http.get("/status")).json()["is_settled"] is True


async def test_a_new_configuration_rolls_only_what_it_changes(operator: Operator, heard: Path) -> None:
    before = pids(await operator.status())
    pools = {"prefill": {"num_cpus": 1}, "decode": {"num_cpus": 1, "worker": {"engine": {"max_num_seqs": 3}}}}
    await operator.up(config(str(heard), pools=pools))
    after = pids(await settled(operator))
    assert after.keys() == {"prefill-0", "decode-0", "gateway-0"} and after["prefill-0"] == before["prefill-0"]
    assert after["decode-0"] != before["decode-0"]
    with pytest.raises(OperationRefusedError, match="router cannot change while the cluster runs"):
        await operator.up(config(str(heard), router={"port": 1234}))


async def test_a_cluster_that_cannot_start_says_why_and_leaves_nothing() -> None:
    with pytest.raises(ClusterError, match="did not start: ValueError: these weights are broken"):
        await up(config("broken", name="broken"))
    await Operator("broken").down()
    assert not [actor for actor in ray.util.list_named_actors(all_namespaces=True) if "broken" in str(actor)]


async def test_the_end_leaves_nothing_even_without_a_controller(tmp_path: Path) -> None:
    status = await up(config(str(tmp_path), name="lost"))
    ray.kill(find_controller("lost"), no_restart=True)
    await Operator("lost").down()
    await until_gone(list(pids(status).values()))
    groups = ray.util.placement_group_table().values()
    assert {group["state"] for group in groups if group["name"].startswith("lost-")} == {"REMOVED"}
    with pytest.raises(OperationRefusedError, match="no cluster 'lost' is up here"):
        await Operator("lost").status()


async def test_what_a_process_is_started_with_is_small(tmp_path: Path) -> None:
    """Ray evicts large constructor arguments, and an actor without them cannot be started again."""
    settings = config(str(tmp_path))
    assert all(len(pickle.dumps(spec)) < 10_000 for spec in settings.worker_specs())
    assert len(pickle.dumps(settings)) < 20_000
