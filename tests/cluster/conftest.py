"""Whole clusters for tests: real Ray, real workers, a real gateway, in the session's shared Ray."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest_asyncio

from baton.cluster.config import ClusterConfig
from baton.cluster.desired import Desired
from baton.cluster.ray_launcher import RayLauncher
from baton.cluster.supervisor import Supervisor, supervised


@dataclass(frozen=True, slots=True)
class ServingCluster:
    address: str  # of the gateway, http://host:port
    supervisor: Supervisor


Serve = Callable[[ClusterConfig], Awaitable[ServingCluster]]


@pytest_asyncio.fixture
async def serving_cluster(shared_ray: None) -> AsyncGenerator[Serve]:
    """`await serving_cluster(config)` returns once requests can be sent; the test's end takes the cluster down."""
    async with AsyncExitStack() as stack:

        async def serve(config: ClusterConfig) -> ServingCluster:
            supervisor = Supervisor(Desired.of(config), RayLauncher(config))
            address = await stack.enter_async_context(supervised(supervisor))
            return ServingCluster(address, supervisor)

        yield serve
