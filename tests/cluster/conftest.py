"""Whole clusters for tests: real Ray, real workers, a real gateway, in the session's shared Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

import httpx
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
            async with asyncio.timeout(60), httpx.AsyncClient(base_url=address, timeout=60) as http:
                while (await http.get("/health")).status_code != 200:  # the gateway connects a moment after the start
                    await asyncio.sleep(0.1)
            return ServingCluster(address, supervisor)

        yield serve
