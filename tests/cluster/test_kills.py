"""A few deaths and changes under load, on real Ray; tests/acceptance/kill_matrix.py has them all."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio
import ray

from baton.cluster.controller_actor import find_controller
from baton.cluster.operate import Operator
from tests.cluster.fake_cluster import build_fake_worker, fake_config
from tests.cluster.load import Load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.usefixtures("shared_ray")]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def operator(shared_ray: None) -> AsyncGenerator[Operator]:
    operator = Operator("fakes")
    await operator.up(fake_config(name="fakes", gateways=2), worker=build_fake_worker)
    await operator.until_settled(60)
    yield operator
    await operator.down()


async def pid(operator: Operator, name: str) -> int:
    found = {process.name: process.pid for process in (await operator.status()).processes}[name]
    assert found is not None
    return found


@pytest.mark.asyncio(loop_scope="module")
async def test_deaths_and_changes_under_load_lose_no_request(operator: Operator) -> None:
    gateways = (await operator.status()).gateways
    async with Load(lambda: gateways) as load:
        await asyncio.sleep(1)
        os.kill(await pid(operator, "decode-0"), signal.SIGKILL)
        await asyncio.sleep(1)
        await operator.until_settled(60)
        os.kill(await pid(operator, "gateway-0"), signal.SIGTERM)  # which lets its streams end
        await asyncio.sleep(1)
        await operator.until_settled(60)
        ray.kill(find_controller("fakes"), no_restart=False)
        await operator.until_settled(60)
        await operator.restart(["decode-1", "prefill-0"])
        await operator.until_settled(60)
        before = time.monotonic()
        await operator.switch_role("prefill-1", "decode")
        await operator.until_settled(60)
        assert time.monotonic() - before < 5  # the command's own polling included; a load of weights takes longer
        await asyncio.sleep(1)
    assert load.account.ends.keys() == {"right"}, load.account.errors
    assert load.account.ends["right"] > 20
