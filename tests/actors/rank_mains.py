"""Lives of a rank that go wrong; a module of its own, since the rank's process imports it."""

from __future__ import annotations

import sys

import torch

from baton.actors.config import WorkerConfig
from baton.actors.ranks import Seat


def ends_at_once(config: WorkerConfig, seat: Seat) -> None:
    sys.exit(3)


def ends_after_meeting(config: WorkerConfig, seat: Seat) -> None:
    seat.take(torch.device("cpu"))
