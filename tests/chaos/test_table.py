"""Every cell of the chaos table: whatever happens, the request ends right, others are unharmed, and nothing leaks."""

from __future__ import annotations

import pytest

from tests.chaos.cells import CELLS, Cell
from tests.chaos.conftest import Played

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]


@pytest.mark.parametrize("cell", CELLS, ids=str)
async def test_cell(cell: Cell, played: Played) -> None:
    outcome = await played[cell]
    assert not outcome.problems, "\n".join(outcome.problems)
