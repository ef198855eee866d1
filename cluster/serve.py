"""`baton serve`: a cluster in the foreground, for as long as it is wanted. Talks to people on stderr only."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from rich.console import Console

from baton.actors.engine.model_reference import resolve_model
from baton.cluster.config import LOCAL, ClusterConfig
from baton.cluster.ray_launcher import RayLauncher
from baton.cluster.supervisor import Status, Supervisor, supervised

messages = Console(stderr=True, highlight=False)


@asynccontextmanager
async def serving(config: ClusterConfig, *, log_to_driver: bool) -> AsyncGenerator[str]:
    """Bring `config` up with progress on stderr, yield the gateway's address, take everything down."""
    if config.ray.address == LOCAL:
        resolve_model(config.worker.model)  # says what is missing before Ray takes its seconds to start
    with messages.status("starting Ray") as progress:

        def show(statuses: tuple[Status, ...]) -> None:
            progress.update("  ".join(f"{status.name} [bold]{status.state}[/bold]" for status in statuses))

        supervisor = Supervisor(config, RayLauncher(config, log_to_driver=log_to_driver), on_change=show)
        async with supervised(supervisor) as address:
            progress.stop()
            yield address


async def serve(config: ClusterConfig) -> None:
    """Serve until SIGINT or SIGTERM; a second signal cuts the draining short."""
    async with serving(config, log_to_driver=True) as address:
        pools = ", ".join(f"{pool.replicas} {role}" for role, pool in config.pools.items())
        messages.print(
            f"[bold green]serving[/bold green] {config.worker.served_name} at {address}/v1 ({pools}); Ctrl-C stops"
        )
        await _until_signalled()
        messages.print("stopping: running requests may end first; Ctrl-C again to cut them off")


async def _until_signalled() -> None:
    loop = asyncio.get_running_loop()
    signalled = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled.set)
    await signalled.wait()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.remove_signal_handler(number)
