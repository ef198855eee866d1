"""`baton serve`: a cluster in the foreground, for as long as it is wanted. Talks to people on stderr only."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager

from rich.console import Console

from baton.actors.engine.model_reference import resolve_model
from baton.cluster.config import LOCAL, ClusterConfig
from baton.cluster.controller import Controller, controlled
from baton.cluster.ray_launcher import RayLauncher
from baton.cluster.watched import ProcessStatus

messages = Console(stderr=True, highlight=False)


@asynccontextmanager
async def serving(config: ClusterConfig, launcher: RayLauncher) -> AsyncGenerator[str]:
    """Bring `config` up with progress on stderr, yield the gateway's address, take everything down; so on SIGTERM."""
    if config.ray.address == LOCAL:
        resolve_model(config.worker.model)  # says what is missing before Ray takes its seconds to start
    with messages.status("starting Ray") as progress:

        def show(statuses: tuple[ProcessStatus, ...]) -> None:
            progress.update("  ".join(f"{status.name} [bold]{status.state}[/bold]" for status in statuses))

        launcher.connect()
        with _cancelled_by_sigterm():
            async with controlled(Controller(config, launcher, on_change=show)) as address:
                progress.stop()
                yield address


@contextmanager
def _cancelled_by_sigterm() -> Generator[None]:
    """Replace Ray's own handler, which would end the process on the spot."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def serve(config: ClusterConfig, launcher: RayLauncher) -> None:
    """Serve until SIGINT or SIGTERM; a second signal cuts the draining short."""
    async with serving(config, launcher) as address:
        signalled = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, signalled.set)
        pools = ", ".join(f"{pool.replicas} {role}" for role, pool in config.pools.items())
        name = config.worker.served_name
        messages.print(f"[bold green]serving[/bold green] {name} at {address}/v1 ({pools}); Ctrl-C stops")
        await signalled.wait()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        messages.print("stopping: running requests may end first; Ctrl-C again cuts them off")
