"""Worlds of processes for the whole table, and the table itself at the end of the run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from rich.console import Console

from tests.chaos.cells import Cell
from tests.chaos.report import as_markdown, as_table
from tests.chaos.world import CellRun, Outcome, World

NUM_WORLDS = 2
OUTCOMES: list[Outcome] = []


Played = dict[Cell, asyncio.Future[Outcome]]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def worlds() -> AsyncIterator[list[World]]:
    shared_memory = set(os.listdir("/dev/shm"))
    worlds = [World() for _ in range(NUM_WORLDS)]
    for world in worlds:
        for name in ("P", "D", "spare"):
            await world.start(name)
    yield worlds
    left = [pid for world in worlds for pid in await world.close()]
    assert not left, f"processes {left} are left"
    assert set(os.listdir("/dev/shm")) <= shared_memory, "shared memory is left"


@pytest.fixture(scope="session")
def world(worlds: list[World]) -> World:
    return worlds[0]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def played(request: pytest.FixtureRequest, worlds: list[World]) -> AsyncIterator[Played]:
    """Play every cell that is asked for, one at a time in each world; most of a cell is waiting."""
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    played: Played = {one["cell"]: asyncio.Future() for one in params if "cell" in one}
    cells = iter(played)
    players = [asyncio.create_task(play(world, cells, played)) for world in worlds]
    yield played
    for player in players:
        player.cancel()
    await asyncio.gather(*players, return_exceptions=True)


async def play(world: World, cells: Iterator[Cell], played: Played) -> None:
    for cell in cells:
        try:
            outcome = await CellRun(world, cell).run()
        except Exception as error:  # this cell's, not the next one's
            played[cell].set_exception(error)
            await world.rebuild()
            continue
        OUTCOMES.append(outcome)
        if outcome.problems:
            await world.rebuild()
        played[cell].set_result(outcome)


def pytest_terminal_summary() -> None:
    if OUTCOMES:
        Console(width=200).print(as_table(OUTCOMES))
        if (path := os.environ.get("BATON_CHAOS_TABLE")) is not None:
            Path(path).write_text(as_markdown(OUTCOMES))
