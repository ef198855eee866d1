"""`baton serve` with tiny processes, in a Ray of its own, for tests to send signals to."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import ray.cloudpickle
import tiny_processes

from baton.cluster.config import ClusterConfig
from baton.cluster.ray_launcher import RayLauncher
from baton.cluster.serve import serve

if __name__ == "__main__":
    ray.cloudpickle.register_pickle_by_value(tiny_processes)  # actors do not find this folder
    model = str(Path(sys.argv[1]))
    config = ClusterConfig.model_validate(
        {"worker": {"model": model, "served_name": "m"}, "pools": {"both": {"num_cpus": 0.5}}}
    )
    launcher = RayLauncher(config, worker=tiny_processes.TinyWorker, gateway=tiny_processes.TinyGateway)
    asyncio.run(serve(config, launcher))
