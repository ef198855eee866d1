"""What an engine step costs in milliseconds, as six numbers that each worker fits to its own steps.

    step = constant + prefill tokens + prefill tokens x their context + decoding sequences + their KV tokens + drafts

Pure floats: workers fit and publish it, routers predict with it, the simulator runs on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from baton.actors.engine.batch import Row


class StepShape(NamedTuple):
    """What a step's time depends on."""

    prefill_tokens: int = 0
    prefill_context: float = 0.0  # sum over prefill tokens of the positions that each attends to
    num_decodes: int = 0
    decode_tokens: int = 0  # KV tokens that the decoding sequences read
    num_drafts: int = 0  # tokens verified beside the decoding sequences' own

    @classmethod
    def of(cls, rows: Iterable[Row]) -> StepShape:
        prefill_tokens = num_decodes = decode_tokens = num_drafts = 0
        prefill_context = 0.0
        for row in rows:
            if row.num_tokens == 1 + row.num_drafts and row.sample:
                num_decodes += 1
                decode_tokens += row.start
                num_drafts += row.num_drafts
            else:
                prefill_tokens += row.num_tokens
                prefill_context += row.num_tokens * (row.start + 0.5 * row.num_tokens)
        return cls(prefill_tokens, prefill_context, num_decodes, decode_tokens, num_drafts)


class StepCost(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Milliseconds a unit of each part. The defaults, of an 8B model on one H200, stand until something is fitted."""

    constant_ms: float = 4.2
    prefill_token_ms: float = 0.021
    prefill_context_ms: float = 9.4e-7
    decode_ms: float = 0.0125
    decode_token_ms: float = 3.3e-5
    draft_ms: float = 0.0125  # the drafter's own work included

    def step_ms(self, shape: StepShape) -> float:
        return (
            self.constant_ms
            + self.prefill_part_ms(shape)
            + self.decode_ms * shape.num_decodes
            + self.decode_token_ms * shape.decode_tokens
            + self.draft_ms * shape.num_drafts
        )

    def prefill_part_ms(self, shape: StepShape) -> float:
        return self.prefill_token_ms * shape.prefill_tokens + self.prefill_context_ms * shape.prefill_context


class StepCostFit:
    """Fits a StepCost to steps as they end: least squares of the relative error, forgetting slowly, never negative.

    Keeps the normal equations and takes one sweep of coordinate descent a step. What no step has informed keeps its
    value, so a worker that only decodes for hours still knows what prefill costs.
    """

    def __init__(self, prior: StepCost | None = None, *, memory_steps: float = 1000.0) -> None:
        self._scale = _units(prior or StepCost())
        self._weights = [1.0] * len(self._scale)  # multiples of the prior: all of one magnitude
        self._keep = 1.0 - 1.0 / memory_steps
        self._gram = [[0.0] * len(self._scale) for _ in self._scale]
        self._moment = [0.0] * len(self._scale)
        self.num_steps = 0

    @property
    def cost(self) -> StepCost:
        constant, token, context, decode, decode_token, draft = (
            weight * unit for weight, unit in zip(self._weights, self._scale, strict=True)
        )
        return StepCost(
            constant_ms=constant,
            prefill_token_ms=token,
            prefill_context_ms=context,
            decode_ms=decode,
            decode_token_ms=decode_token,
            draft_ms=draft,
        )

    def add(self, shape: StepShape, step_ms: float) -> None:
        """Learn from one step. Raises ValueError if it took no time."""
        if step_ms <= 0:
            raise ValueError(f"a step took {step_ms} ms")
        parts = (1.0, *map(float, shape))
        row = [part * unit / step_ms for part, unit in zip(parts, self._scale, strict=True)]
        for i, x in enumerate(row):
            gram = self._gram[i]
            for j, y in enumerate(row):
                gram[j] = self._keep * gram[j] + x * y
            self._moment[i] = self._keep * self._moment[i] + x
        self.num_steps += 1
        self._sweep()

    def _sweep(self) -> None:
        weights = self._weights
        for i, gram in enumerate(self._gram):
            if gram[i] > TINY:
                gradient = sum(g * w for g, w in zip(gram, weights, strict=True)) - self._moment[i]
                weights[i] = max(weights[i] - gradient / gram[i], 0.0)


TINY = 1e-200  # below this, what was known of a part has been forgotten


def _units(cost: StepCost) -> list[float]:
    return [
        cost.constant_ms, cost.prefill_token_ms, cost.prefill_context_ms, cost.decode_ms, cost.decode_token_ms,
        cost.draft_ms,
    ]  # fmt: skip
