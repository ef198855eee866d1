"""Brings a tiny cluster up in a Ray of its own, prints pids and names of what it started, waits to be killed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import psutil
from tiny_processes import TinyGateway, TinyWorker

from baton.cluster.config import ClusterConfig
from baton.cluster.ray_launcher import RayLauncher
from baton.cluster.supervisor import Supervisor, supervised

CONFIG = ClusterConfig.model_validate(
    {"worker": {"model": "tiny", "served_name": "m"}, "pools": {"both": {"num_cpus": 0.5}}}
)


async def main() -> None:
    supervisor = Supervisor(CONFIG, RayLauncher(CONFIG, worker=TinyWorker, gateway=TinyGateway))
    async with supervised(supervisor):
        children = psutil.Process().children(recursive=True)
        print(json.dumps({child.pid: Path(child.cmdline()[0].strip()).name for child in children}), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
