"""SIGTERM in an actor's process, told to the actor.

Only a process's main thread may set signal handlers, and all methods of an async actor run in another. But Ray loads an
actor's class in the main thread: a `Sigterm` in the class's body is unpickled there, and sets its handler then.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Sigterm:
    def __init__(self, before: Callable[[int, FrameType | None], Any] = lambda number, frame: None) -> None:
        self.listener: Callable[[], object] | None = None  # called in the main thread; without it Ray ends the process
        self._before = before

    def __reduce__(self) -> tuple[Callable[[], Sigterm], tuple[()]]:
        return _caught, ()

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.listener is not None:
            self.listener()
        else:
            self._before(number, frame)


def _caught() -> Sigterm:
    """Put a new one before Ray's own handler. Who only looks an actor up unpickles its class too, in any thread."""
    before = signal.getsignal(signal.SIGTERM)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        return Sigterm()
    sigterm = Sigterm(before)
    signal.signal(signal.SIGTERM, sigterm.handle)
    return sigterm
