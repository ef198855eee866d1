"""A torch profile of the engine's thread, on demand."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from baton.actors.step_loop import StepLoop


async def profile_steps(steps: StepLoop, seconds: float) -> bytes:
    """Record for `seconds`; return a gzipped Chrome trace. One at a time."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    recorder = profile(activities=activities)
    await steps.call(lambda _: recorder.start())  # operators are recorded on the thread that starts it
    try:
        await asyncio.sleep(seconds)
    finally:
        await steps.call(lambda _: recorder.stop())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz"
        await asyncio.to_thread(recorder.export_chrome_trace, str(path))
        return path.read_bytes()
