"""Starts the one thing that a process exists for, in the background, so that the process answers probes meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from baton.cluster.processes import Life

T = TypeVar("T")


class Startup(Generic[T]):
    """Lives as long as its process. A failed start stays failed: the supervisor begins another process."""

    def __init__(self, start: Callable[[], Awaitable[T]]) -> None:
        self._start = start
        self._task: asyncio.Future[T] | None = None

    def probe(self) -> Life[T]:
        """Tell how far the start is; begin it if nobody did. Call from the process's event loop."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._start())
        if not self._task.done():
            return Life()
        error = self._task.exception()
        return Life(ready=self._task.result()) if error is None else Life(failure=described(error))

    async def cancel(self) -> None:
        """Give up a start that has not ended; what is ready stays ready."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
