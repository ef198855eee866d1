"""The chaos table as data: every phase of a hand-over, everything that may happen in it, and who is hit.

A phase is a point of the protocol at which one request is held while the event happens.
"""

from __future__ import annotations

from dataclasses import dataclass
from signal import SIGKILL, SIGSTOP, SIGTERM, Signals
from typing import Literal

from tests.chaos.gates import Act

Place = Literal["P", "D"]
Victim = Literal["P", "D", "client", "gateway", "link"]


@dataclass(frozen=True)
class Phase:
    """`point` is passed in the process of `place`, by a message heard or said, or by a step of the mover."""

    name: str
    place: Place
    point: str
    nth: int = 1
    is_full: bool = False  # D has no room: another import, held by P, fills its pool
    is_new: bool = False  # D has no stream to P yet: all that want P wait for the Hello


@dataclass(frozen=True)
class Event:
    name: str
    victim: Victim
    signal: Signals | None = None
    pause_s: float = 0.0  # how long a stopped process stays stopped, or a held message held
    act: Act = "hold"
    restarts_in_place: bool = False  # at its old address, and nobody else is told that it died

    @property
    def ends_process(self) -> bool:
        return self.signal in (SIGKILL, SIGTERM)

    @property
    def loses_client(self) -> bool:
        return self.victim == "client" or (self.victim == "gateway" and self.ends_process)


@dataclass(frozen=True)
class Cell:
    phase: Phase
    event: Event

    def __str__(self) -> str:
        return f"{self.phase.name}-{self.event.victim} {self.event.name}".replace(" ", "_")


BEAT_S = 0.2
BOUND_S = 1.0  # of leases and stalls, in these tests
BLINK_S = 0.3  # well within the bounds
TOO_LONG_S = 1.6  # well beyond them

PHASES = (
    Phase("submitted", "D", "hears.Submit"),
    Phase("connecting", "P", "hears.Hello", is_new=True),
    Phase("opened", "P", "hears.Open"),
    Phase("admitted", "P", "says.Admitted"),
    Phase("placed", "P", "hears.Place"),
    Phase("no room", "P", "hears.Hold", is_full=True),
    Phase("first write", "P", "write"),
    Phase("third write", "P", "write", nth=3),
    Phase("written", "P", "completion", nth=2),
    Phase("prefilled", "P", "says.Prefilled"),
    Phase("arriving", "D", "arrival", nth=4),
    Phase("landed", "P", "hears.Landed"),
    Phase("first token", "D", "says.Frame"),
    Phase("decoding", "D", "says.Frame", nth=3),
)

EVENTS = (
    Event("slow", "link", pause_s=BLINK_S),
    Event("repeats", "link", act="double"),
    Event("breaks", "link", act="break"),
    Event("killed", "P", SIGKILL),
    Event("restarted", "P", SIGKILL, restarts_in_place=True),
    Event("terminated", "P", SIGTERM),
    Event("stopped", "P", SIGSTOP, BLINK_S),
    Event("frozen", "P", SIGSTOP, TOO_LONG_S),
    Event("killed", "D", SIGKILL),
    Event("restarted", "D", SIGKILL, restarts_in_place=True),
    Event("terminated", "D", SIGTERM),
    Event("stopped", "D", SIGSTOP, BLINK_S),
    Event("frozen", "D", SIGSTOP, TOO_LONG_S),
    Event("cancels", "client"),
    Event("vanishes", "client"),
    Event("killed", "gateway", SIGKILL),
    Event("terminated", "gateway", SIGTERM),
    Event("stopped", "gateway", SIGSTOP, BLINK_S),
)

# HTTP/2 cannot repeat a message of a stream, and between gateway and worker nothing else is there to repeat.
IMPOSSIBLE = {("hears.Submit", "double"), ("says.Frame", "double")}

CELLS = tuple(Cell(phase, event) for phase in PHASES for event in EVENTS if (phase.point, event.act) not in IMPOSSIBLE)
