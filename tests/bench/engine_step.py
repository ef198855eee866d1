"""Host time of one engine step with many decoding sequences: schedule and commit, a runner that costs nothing.

python tests/bench/engine_step.py [num_sequences] [num_steps]
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass

from baton.actors.engine.batch import Batch, StepOutput
from baton.actors.engine.config import EngineConfig
from baton.actors.engine.engine import Engine
from baton.actors.engine.request import Request, SamplingParams


@dataclass(slots=True)
class _Step:
    output: StepOutput

    def wait(self) -> StepOutput:
        return self.output


class ClockedRunner:
    """Samples token 7 everywhere, and adds up the time spent in it so that it can be taken off."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def launch(self, batch: Batch) -> _Step:
        started = time.perf_counter()
        output = StepOutput(tuple((7,) if row.sample else () for row in batch.rows), (None,) * len(batch.rows))
        self.seconds += time.perf_counter() - started
        return _Step(output)


def measure(num_sequences: int, num_steps: int, *, overlap: bool) -> list[float]:
    """Return the milliseconds of each step once every sequence decodes."""
    config = EngineConfig(max_num_seqs=num_sequences, max_step_tokens=max(8192, num_sequences), overlap=overlap)
    runner = ClockedRunner()
    engine = Engine(config, runner, num_blocks=100_000, max_context=100_000, eos_token_ids=frozenset({0}))
    for number in range(num_sequences):
        sampling = SamplingParams(max_tokens=100_000, seed=number)
        engine.submit(Request(id=f"r{number}", tokens=tuple(range(number, number + 1000)), sampling=sampling))
    while engine.num_waiting or engine.waiting_tokens:
        engine.step()
    times: list[float] = []
    for _ in range(num_steps):
        runner.seconds = 0.0
        started = time.perf_counter()
        engine.step()
        times.append(1e3 * (time.perf_counter() - started - runner.seconds))
    engine.check_integrity()
    return times


def main() -> None:
    num_sequences = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    num_steps = int(sys.argv[2]) if len(sys.argv) > 2 else 1000
    for overlap in (True, False):
        times = sorted(measure(num_sequences, num_steps, overlap=overlap))
        print(
            f"{num_sequences} decoding, overlap {overlap}: median {statistics.median(times):.3f} ms, "
            f"p99 {times[int(0.99 * len(times))]:.3f} ms, max {times[-1]:.3f} ms a step"
        )


if __name__ == "__main__":
    main()
