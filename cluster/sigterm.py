"""SIGTERM in an actor's process, told to the actor.

Only a process's main thread may set signal handlers, and all methods of an async actor run in another. But Ray loads an
actor's class in the main thread: a `Sigterm` in the class's body is unpickled there, and sets its handler then.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType


class Sigterm:
    def __init__(self) -> None:
        self.listener: Callable[[], object] | None = None  # called in the main thread; without it Ray ends the process
        self._before = signal.Handlers.SIG_DFL

    def __reduce__(self) -> tuple[Callable[[], Sigterm], tuple[()]]:
        return _caught, ()

    def catch(self) -> None:
        self._before = signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.listener is not None:
            self.listener()
        elif callable(self._before):
            self._before(number, frame)


def _caught() -> Sigterm:
    sigterm = Sigterm()
    sigterm.catch()
    return sigterm
