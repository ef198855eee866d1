"""One world of processes for the whole table, and the table itself at the end of the run."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from rich.console import Console

from tests.chaos.report import as_markdown, as_table
from tests.chaos.world import Outcome, World

OUTCOMES: list[Outcome] = []


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def world() -> AsyncIterator[World]:
    shared_memory = set(os.listdir("/dev/shm"))
    world = World()
    for name in ("P", "D", "spare"):
        await world.start(name)
    yield world
    left = await world.close()
    assert not left, f"processes {left} are left"
    assert set(os.listdir("/dev/shm")) <= shared_memory, "shared memory is left"


@pytest.fixture
def outcomes() -> list[Outcome]:
    return OUTCOMES


def pytest_terminal_summary() -> None:
    if OUTCOMES:
        Console(width=200).print(as_table(OUTCOMES))
        if (path := os.environ.get("BATON_CHAOS_TABLE")) is not None:
            Path(path).write_text(as_markdown(OUTCOMES))
