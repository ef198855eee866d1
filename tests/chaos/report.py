"""The chaos table for people: phases down, events across, in each cell how long the request took to end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rich.table import Table

from tests.chaos.cells import EVENTS, PHASES, Event
from tests.chaos.world import Outcome

CAPTION = (
    "Seconds from the event to the request's right end, + seconds until every pool was whole; "
    "* = answered over a second stream; FAIL = some claim did not hold."
)


class Row(NamedTuple):
    phase: str
    cells: list[str]


def rows(outcomes: Iterable[Outcome]) -> Iterator[Row]:
    found = {(outcome.cell.phase, outcome.cell.event): outcome for outcome in outcomes}
    for phase in PHASES:
        yield Row(phase.name, [_text(found.get((phase, event))) for event in EVENTS])


def as_table(outcomes: list[Outcome]) -> Table:
    table = Table(title=f"Chaos: {_summary(outcomes)}", caption=CAPTION)
    for header in ("phase", *map(_header, EVENTS)):
        table.add_column(header)
    for row in rows(outcomes):
        table.add_row(row.phase, *row.cells)
    return table


def as_markdown(outcomes: list[Outcome]) -> str:
    headers = ["phase", *map(_header, EVENTS)]
    lines = [f"| {' | '.join(headers)} |", f"| {' | '.join('---' for _ in headers)} |"]
    lines += [f"| {' | '.join([row.phase, *row.cells])} |" for row in rows(outcomes)]
    return "\n".join([*lines, "", f"{_summary(outcomes)} {CAPTION}", ""])


def _header(event: Event) -> str:
    return f"{event.victim} {event.name}"


def _text(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    if outcome.problems:
        return "FAIL"
    return f"{outcome.end_s:.1f}+{outcome.whole_s:.1f}{'*' if outcome.num_streams > 1 else ''}"


def _summary(outcomes: list[Outcome]) -> str:
    num_failed = sum(bool(outcome.problems) for outcome in outcomes)
    return f"{len(outcomes)} cells, {num_failed} failed."
