"""Tensor parallelism: rank 0 plans and tells the other ranks every batch; each runs it on its share of the model.

Every rank samples for itself: the gathered logits are the same bits everywhere and sampling is a pure function of
them, so the ids agree, stay on each device for the next step, and no further exchange holds the step up.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from baton.actors.engine.batch import Batch, PendingStep, Runner, StepOutput
from baton.actors.engine.batch_wire import BatchDecoder, BatchEncoder

NOTICE_S = 2.0  # for a rank's end to become known, once a collective has failed


class Followers(Protocol):
    """The ranks other than 0, as rank 0's runner sees them."""

    def send(self, message: bytes) -> None:
        """Tell each; raises RankLost."""
        ...

    def check(self, within_s: float = 0.0) -> None:
        """Raise RankLost if a rank has ended, or ends within this time."""
        ...


class RankRunner:
    """Rank 0's runner. A rank's end raises RankLost here, for a step without it cannot be right."""

    def __init__(self, runner: Runner, followers: Followers) -> None:
        self._runner = runner
        self._followers = followers
        self._encoder = BatchEncoder()

    def launch(self, batch: Batch) -> PendingStep:
        self._followers.send(self._encoder.encode(batch))
        with _blaming_ranks(self._followers):
            return _RankStep(self._runner.launch(batch), self._followers)


@dataclass(frozen=True, slots=True)
class _RankStep:
    step: PendingStep
    followers: Followers

    def wait(self) -> StepOutput:
        with _blaming_ranks(self.followers):
            output = self.step.wait()
        self.followers.check()  # an aborted collective ends, with anything in its result
        return output


@contextmanager
def _blaming_ranks(followers: Followers) -> Generator[None]:
    try:
        yield
    except RuntimeError:  # whatever the collective's library makes of a peer that is gone
        followers.check(within_s=NOTICE_S)
        raise


def follow(runner: Runner, receive: Callable[[], bytes]) -> None:
    """Run what rank 0 sends, until `receive` raises EOFError. At most two steps are in flight, as on rank 0."""
    decoder = BatchDecoder()
    before: PendingStep | None = None
    while True:
        pending = runner.launch(decoder.decode(receive()))
        if before is not None:
            before.wait()
        before = pending
