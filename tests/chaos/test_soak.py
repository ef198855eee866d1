"""A short soak; `python tests/bench/soak.py` runs the long one, whose memory slopes mean something."""

from __future__ import annotations

import pytest

from tests.bench.soak import soak


@pytest.mark.slow
async def test_500_short_requests_with_aborts_and_kills_leave_nothing_behind() -> None:
    report = await soak(500)
    assert [problem for problem in report.problems if "grew" not in problem] == []
    assert report.num_right + report.num_aborted == 500 and report.num_wrong == 0
    assert report.num_kills >= 3 and report.num_aborted > 20
