"""What to send and when: requests with prompts of token ids, from a trace or made up.

Equal content ids of a trace become equal tokens, so its shared prefixes are shared here too, at any scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from pathlib import Path

import numpy as np

from baton.cluster.sim.trace import ID_TOKENS, read_trace, repeated, scaled, spread

MAX_SPREAD = 4.0


@dataclass(frozen=True, slots=True)
class Job:
    """One request: `time_s` after the start, `output_len` tokens wanted (the end-of-text token does not count)."""

    time_s: float
    prompt: tuple[int, ...]
    output_len: int


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How a trace is fitted to a server: `speed` times as fast, lengths times `prompt` and `output`, then cut."""

    speed: float = 1.0
    prompt: float = 1.0
    output: float = 1.0
    max_prompt: int = 1 << 30
    max_output: int = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Log-normal lengths in tokens, with these means. The defaults are like ShareGPT's conversations."""

    prompt: int = 161
    output: int = 338
    sigma: float = 1.0  # of the logarithms; 0 = all equal


class Tokens:
    """Makes token ids between `first` and `end`, the same for the same content id."""

    def __init__(self, first: int, end: int) -> None:
        self._first = first
        self._end = end
        self.block = lru_cache(4096)(self._block)

    def _block(self, content: int, size: int) -> tuple[int, ...]:
        return tuple(np.random.default_rng(content).integers(self._first, self._end, size).tolist())


def trace_jobs(path: Path, scale: Scale, tokens: Tokens, num_requests: int | None) -> list[Job]:
    """Read a Mooncake or Azure trace. Raises TraceError."""
    arrivals = spread(read_trace(path))
    if num_requests is not None:
        arrivals = repeated(arrivals, num_requests)
    size = max(round(ID_TOKENS * scale.prompt), 1)
    jobs: list[Job] = []
    for arrival in scaled(arrivals, scale.speed):
        prompt_len = min(max(round(arrival.prompt_len * scale.prompt), 1), scale.max_prompt)
        blocks = (tokens.block(id, size) for id in arrival.ids[: math.ceil(prompt_len / size)])
        prompt = tuple(token for block in blocks for token in block)[:prompt_len]
        jobs.append(
            Job(arrival.time_s, prompt, min(max(round(arrival.output_len * scale.output), 1), scale.max_output))
        )
    return jobs


def made_up_jobs(lengths: Lengths, scale: Scale, tokens: Tokens, times: Sequence[float]) -> list[Job]:
    """Give each of `times` a request with a prompt of its own."""
    rng = np.random.default_rng(0)
    prompts = _lengths(rng, lengths.prompt, lengths.sigma, len(times))
    outputs = _lengths(rng, lengths.output, lengths.sigma, len(times))
    return [
        Job(time_s, tokens.block(i, min(prompt, scale.max_prompt)), min(output, scale.max_output))
        for i, time_s, prompt, output in zip(count(1), times, prompts, outputs, strict=False)
    ]


def arrival_times(rate: float, duration_s: float, *, is_poisson: bool) -> list[float]:
    """Return when requests come: `rate` a second for `duration_s`, at random (exponential gaps) or evenly."""
    return list(_times(rate, duration_s, np.random.default_rng(0) if is_poisson else None))


def _times(rate: float, duration_s: float, rng: np.random.Generator | None) -> Iterator[float]:
    time_s = 0.0
    while time_s < duration_s:
        yield time_s
        time_s += 1 / rate if rng is None else float(rng.exponential(1 / rate))


def _lengths(rng: np.random.Generator, mean: int, sigma: float, num: int) -> list[int]:
    """Draw log-normal lengths, at most `MAX_SPREAD` deviations from the middle: the mean would hang on a few else."""
    z = np.clip(rng.standard_normal(num), -MAX_SPREAD, MAX_SPREAD)
    lengths = mean * np.exp(sigma * z - sigma**2 / 2)
    return np.maximum(np.rint(lengths), 1).astype(int).tolist()
