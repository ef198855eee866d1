"""The serving command as a process: how it ends, and what it leaves behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from cluster_fakes import until_gone

HERE = Path(__file__).parent
RAYS_AGENTS = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}  # idle without a raylet; Ray ends them after a minute


@dataclass(frozen=True, slots=True)
class Server:
    process: asyncio.subprocess.Process
    children: dict[int, str]  # pid -> name


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncGenerator[Server]:
    (tmp_path / "config.json").touch()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        HERE / "tiny_server.py",
        tmp_path,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
    )
    try:
        assert process.stderr is not None
        while b"serving" not in (line := await process.stderr.readline()):
            assert line, "the server ended before it served"
        children = psutil.Process(process.pid).children(recursive=True)
        yield Server(process, {child.pid: Path(child.cmdline()[0].strip()).name for child in children})
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_in_order_and_nothing_is_left(server: Server, number: signal.Signals) -> None:
    server.process.send_signal(number)
    async with asyncio.timeout(20):
        assert await server.process.wait() == 0
    await until_gone(list(server.children))


async def test_nothing_that_serves_outlives_a_killed_command(server: Server) -> None:
    assert {"ray::WorkerActor", "ray::GatewayActor", "raylet", "gcs_server"} <= set(server.children.values())
    server.process.kill()
    await until_gone([pid for pid, name in server.children.items() if name not in RAYS_AGENTS])
