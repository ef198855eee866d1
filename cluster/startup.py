"""Starts the one thing that a process exists for, in the background, so that the process answers probes meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar
from uuid import uuid4

from baton.cluster.processes import Life

T = TypeVar("T")


class Startup(Generic[T]):
    """Lives as long as its process; a failed start is reported once and tried again by the probe after."""

    def __init__(self, start: Callable[[], Awaitable[T]]) -> None:
        self._start = start
        self._boot = uuid4().hex
        self._task: asyncio.Future[T] | None = None

    def probe(self) -> Life[T]:
        """Tell how far the start is; begin it if nobody did. Call from the process's event loop."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._start())
        if not self._task.done():
            return Life(self._boot)
        error = self._task.exception()
        if error is None:
            return Life(self._boot, ready=self._task.result())
        self._task = None
        return Life(self._boot, failure=f"{type(error).__name__}: {error}")

    async def cancel(self) -> None:
        """Give up a start that has not ended; what is ready stays ready."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
