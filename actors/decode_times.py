"""What steps of decodes alone take, with and without drafts: the fitted line, corrected by what was seen beside it.

A GPU pads a step to a captured size, reads its weights at no more cost for 8 rows than for 1, and with drafts the host
cannot work ahead: no straight line holds for all of it. For each size, by the quarter of a doubling, with drafts and
without, a mean step and its time are remembered, and slowly forgotten: a size nobody has seen for long is believed to
be as good as sizes near it were, at last as good as the line says, and so tried again.
"""

from __future__ import annotations

from math import log

import numpy as np
from numpy.typing import NDArray

from baton.actors.step_cost import StepCost, StepShape

_LEARNING = 0.2  # weight of a step, once there were some; the first few weigh more
_KEEP = 1 - 1 / 4000  # of what is known, with each step
_FARTHEST = 1.5  # of a step's logarithm from the line: a pause in the process is no step time
_NUM_SIZES = 80  # up to 2**20 rows
_NEARNESS = 0.25 ** np.abs(np.subtract.outer(np.arange(_NUM_SIZES), np.arange(_NUM_SIZES)))
_LINE_WEIGHT = 0.02  # of the line, where little near by is known
_LEAST_MS = 1e-6

Floats = NDArray[np.float64]


class DecodeTimes:
    """An engine's `DecodeCost`."""

    def __init__(self) -> None:
        self._cost = StepCost()
        # Means of what was seen, [without drafts, with][size]: decodes, their KV tokens, drafts, logarithm of the time.
        # The line moves while it is fitted, so what lies beside it is found anew each time.
        self._seen = np.zeros((4, 2, _NUM_SIZES))
        self._weights = np.zeros((2, _NUM_SIZES))  # of what is known
        self._has_overlap = False

    def add(self, shape: StepShape, cost: StepCost, step_ms: float, *, is_overlapped: bool) -> None:
        """Learn from a step, timed from the end of the one before.

        Where steps overlap at all, one that did not says nothing about steps without drafts.
        """
        self._cost = cost
        self._has_overlap |= is_overlapped
        has_drafts = int(shape.num_drafts > 0)
        if shape.prefill_tokens or (self._has_overlap and not is_overlapped and not has_drafts):
            return
        place = has_drafts, int(_size(np.array(shape.num_decodes + shape.num_drafts)))
        fitted = log(max(cost.step_ms(shape), _LEAST_MS))
        seen = min(max(log(step_ms), fitted - _FARTHEST), fitted + _FARTHEST)
        self._weights *= _KEEP
        self._weights[place] += 1
        mean = self._seen[:, *place]
        mean += max(_LEARNING, 1 / self._weights[place]) * (
            np.array((shape.num_decodes, shape.decode_tokens, shape.num_drafts, seen)) - mean
        )

    def steps_ms(self, num_decodes: int, context: int, num_drafts: NDArray[np.int64]) -> Floats:
        beside = self._beside()[(num_drafts > 0).astype(np.int64), _size(num_decodes + num_drafts)]
        return self._line(num_decodes, context, num_drafts.astype(np.float64)) * np.exp(beside)

    def _line(self, num_decodes: float | Floats, context: float | Floats, num_drafts: Floats) -> Floats:
        cost = self._cost
        plain = cost.constant_ms + cost.decode_ms * num_decodes + cost.decode_token_ms * context
        return np.maximum(plain + cost.draft_ms * num_drafts, _LEAST_MS)

    def _beside(self) -> Floats:
        """Logarithms of seen over fitted: [without drafts, with][size]; of sizes near by where one was seldom seen."""
        num_decodes, context, num_drafts, seen = self._seen
        sureness = self._weights / (self._weights + 1)
        own = sureness * (seen - np.log(self._line(num_decodes, context, num_drafts)))
        near = own @ _NEARNESS / (sureness @ _NEARNESS + _LINE_WEIGHT)
        return own + (1 - sureness) * near


def _size(num_rows: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.minimum(np.rint(4 * np.log2(np.maximum(num_rows, 1))), _NUM_SIZES - 1).astype(np.int64)
