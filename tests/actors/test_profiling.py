from __future__ import annotations

import asyncio
import gzip
import json

import torch
from fake_engine import build_fake_engine

from baton.actors.config import WorkerConfig
from baton.actors.engine.config import EngineConfig
from baton.actors.profiling import profile_steps
from baton.actors.step_loop import StepLoop, StepReport


async def test_a_profile_holds_what_the_engines_thread_computed_meanwhile() -> None:
    config = WorkerConfig(model="fake", served_name="fake", engine=EngineConfig(num_blocks=8))

    def ignore(report: StepReport) -> None:
        pass

    def fail(error: BaseException) -> None:
        raise error

    steps = StepLoop(build_fake_engine(config).engine, asyncio.get_running_loop(), ignore, fail)
    steps.start()
    try:
        profiling = asyncio.create_task(profile_steps(steps, 0.3))
        await asyncio.sleep(0.05)
        await steps.call(lambda _: torch.ones(8, 8) @ torch.ones(8, 8))
        trace = json.loads(gzip.decompress(await profiling))
    finally:
        steps.stop()
    assert "aten::matmul" in {event.get("name") for event in trace["traceEvents"]}
