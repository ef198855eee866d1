"""Kills every kind of process under steady load, on a Ray cluster of a head and two nodes, and says what it cost.

Run by hand: `python -m tests.acceptance.kill_matrix [--write]`. Workers have a fake device; all else is real. `--write`
renews tests/acceptance/KILLS.md. Ends with 1 where a request was lost that need not be, a text was wrong, or a process
or shared memory is left.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import ray
from ray.cluster_utils import Cluster

from baton.actors.messages import Role
from baton.cluster.controller import ClusterStatus
from baton.cluster.operate import Operator
from baton.cluster.ray_launcher import NAMESPACE
from tests.acceptance.commands import Leftovers
from tests.cluster.fake_cluster import build_fake_worker, fake_config
from tests.cluster.load import Account, Load

NAME = "matrix"
CALM_S = 1.0
LIMIT_S = 120.0
TABLE = Path(__file__).with_name("KILLS.md")


@dataclass(frozen=True)
class Case:
    victim: str
    how: str
    spare: bool  # of it: nothing may be lost
    strike: Callable[[World], Any]


@dataclass(frozen=True)
class Row:
    case: Case
    account: Account
    recovery_s: float

    @property
    def is_good(self) -> bool:
        bad = {"wrong"} if not self.case.spare else {"wrong", "lost", "refused"}
        return not bad & self.account.ends.keys() and self.account.ends["right"] > 0

    def __str__(self) -> str:
        ends = self.account.ends
        cells = (
            self.case.victim, self.case.how, ends["right"], ends["lost"], ends["refused"], ends["wrong"],
            f"{self.account.longest_pause_s:.1f}", f"{self.recovery_s:.1f}",
        )  # fmt: skip
        return "| " + " | ".join(map(str, cells)) + " |"


class World:
    """The cluster that is struck. Its processes are found by name in what the controller says."""

    def __init__(self, cluster: Cluster, nodes: list[Any]) -> None:
        self.operator = Operator(NAME)
        self.status: ClusterStatus | None = None
        self.switched_s: list[float] = []
        self._cluster = cluster
        self._nodes = nodes

    async def settled(self) -> ClusterStatus:
        self.status = await self.operator.until_settled(LIMIT_S)
        return self.status

    def gateways(self) -> tuple[str, ...]:
        assert self.status is not None
        return self.status.gateways

    def pid(self, name: str) -> int:
        """Find an actor's process on this machine, where all the nodes are."""
        if name in ("controller", "gateway-0"):
            actor = ray.get_actor(f"{NAME}/{name}", namespace=NAMESPACE)
            return _pid_of_actor(actor)
        assert self.status is not None
        (pid,) = [process.pid for process in self.status.processes if process.name == name]
        assert pid is not None
        return pid

    def kill(self, name: str, number: signal.Signals) -> None:
        os.kill(self.pid(name), number)

    async def shrink(self) -> None:
        await self.operator.scale("prefill", 1)
        await self.operator.scale("decode", 1)

    def kill_decoder(self) -> None:
        assert self.status is not None
        (name,) = [process.name for process in self.status.processes if process.role == "decode"]
        self.kill(name, signal.SIGKILL)

    async def switch(self, worker: str, role: Role) -> None:
        """Note how long it takes until the worker has the role and all gateways have acknowledged it."""
        assert self.status is not None
        async with httpx.AsyncClient(base_url=f"http://{self.status.controller}") as http:
            began = time.monotonic()
            await self.operator.switch_role(worker, role)
            while True:
                seen = (await http.get("/status")).json()
                roles = {process["name"]: process["role"] for process in seen["processes"]}
                if roles[worker] == role and seen["is_settled"]:
                    break
                await asyncio.sleep(0.005)
            self.switched_s.append(time.monotonic() - began)

    def kill_raylet(self, number: signal.Signals) -> None:
        """End the node that has joined last; another joins, as an autoscaler would have it."""
        node = self._nodes.pop()
        raylet = node.all_processes["raylet"][0].process
        raylet.send_signal(number)
        raylet.wait(30)
        self._cluster.remove_node(node, allow_graceful=False)
        self._nodes.append(self._cluster.add_node(num_cpus=1))


def _pid_of_actor(actor: Any) -> int:
    from ray.util.state import get_actor

    found = get_actor(actor._actor_id.hex())
    assert found is not None
    return int(found.pid)


def strikes(name: str) -> list[tuple[str, Callable[[World], Any]]]:
    return [
        ("SIGKILL", lambda world: world.kill(name, signal.SIGKILL)),
        ("SIGTERM", lambda world: world.kill(name, signal.SIGTERM)),
    ]


def cases() -> list[Case]:
    killed = [
        Case(victim, how, (victim, how) != ("gateway-0", "SIGKILL"), strike)
        for victim in ("controller", "gateway-0", "prefill-0", "decode-0")
        for how, strike in strikes(victim)
    ]
    raylets = [
        Case("raylet with its workers", number.name, True, lambda world, number=number: world.kill_raylet(number))
        for number in (signal.SIGKILL, signal.SIGTERM)
    ]
    ordered = [
        Case("all workers", "baton restart", True, lambda world: world.operator.restart([])),
        Case("decode-1", "baton drain", True, lambda world: world.operator.drain("decode-1")),
        Case("decode pool", "baton scale decode=2", True, lambda world: world.operator.scale("decode", 2)),
        Case("prefill-1", "baton switch decode", True, lambda world: world.switch("prefill-1", "decode")),
        Case("prefill-1", "and back", True, lambda world: world.switch("prefill-1", "prefill")),
    ]
    alone = [
        Case("all but one of each role", "baton scale", True, World.shrink),
        Case("both, without a spare", "baton restart", True, lambda world: world.operator.restart([])),
        Case("the only decode worker", "SIGKILL", True, World.kill_decoder),
    ]
    return [*killed, *raylets, *ordered, *alone]


async def play(world: World, case: Case) -> Row:
    await world.settled()
    async with Load(world.gateways, max_tokens=50) as load:
        await asyncio.sleep(CALM_S)
        struck = time.monotonic()
        result = case.strike(world)
        if asyncio.iscoroutine(result):
            await result
        await asyncio.sleep(0.5)  # so that what has died is known to have
        await _until_seen(world)
        recovery_s = time.monotonic() - struck
        await asyncio.sleep(CALM_S)
    row = Row(case, load.account, recovery_s)
    print(row, *load.account.errors[:3], flush=True)
    return row


async def _until_seen(world: World) -> None:
    """Settled twice in a row: between a death and its discovery all seems well."""
    await world.settled()
    await asyncio.sleep(0.5)
    await world.settled()


async def matrix() -> tuple[list[Row], list[float]]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": True})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
    ray.init(address=cluster.address, namespace=NAMESPACE, log_to_driver=False)
    world = World(cluster, nodes)
    try:
        await world.operator.up(fake_config(name=NAME, gateways=2), worker=build_fake_worker)
        rows = [await play(world, case) for case in cases()]
        print("role switches took", *(f"{1e3 * seconds:.0f} ms" for seconds in world.switched_s), flush=True)
        await world.operator.down()
        return rows, world.switched_s
    finally:
        ray.shutdown()
        cluster.shutdown()


def table(rows: list[Row], switched_s: list[float], left: list[str]) -> str:
    head = [
        "# Deaths and changes under load",
        "",
        "`python -m tests.acceptance.kill_matrix --write`: two gateways, two prefill and two decode workers with a",
        "fake device (20 ms a step) on a Ray head and three nodes, all on one machine of two cores; six clients stream",
        "50 tokens each and ask the other gateway where one cannot be reached. Lost: ended by an error after the first",
        "token. Refused: no gateway took it. Wrong: a text other than the undisturbed one. Recovered: everything",
        "serves again as was asked for, seen twice half a second apart: at least 1.0. A killed gateway has no spare",
        "for the streams that go through it. In the last two rows nobody else decodes: requests wait.",
        "",
        "| victim | how | right | lost | refused | wrong | longest pause, s | recovered after, s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    end = f"Processes and shared memory left afterwards: {', '.join(left) or 'none'}."
    switches = " and ".join(f"{1e3 * seconds:.0f} ms" for seconds in switched_s)
    moved = (
        f"From a command to switch a role until every gateway has acknowledged it, looked at every 5 ms: {switches}."
    )
    return "\n".join([*head, *map(str, rows), "", moved, end]) + "\n"


def main() -> int:
    leftovers = Leftovers()
    rows, switched_s = asyncio.run(matrix())
    deadline = time.monotonic() + 90
    while (left := leftovers.now()) and time.monotonic() < deadline:
        time.sleep(0.5)
    text = table(rows, switched_s, left)
    print(text)
    if "--write" in sys.argv:
        TABLE.write_text(text)
    return 0 if all(row.is_good for row in rows) and not left else 1


if __name__ == "__main__":
    sys.exit(main())
