"""What steps of decodes alone take, with and without drafts: the fitted line, corrected by what was seen beside it.

A GPU pads a step to a captured size, reads its weights at no more cost for 8 rows than for 1, and with drafts the host
cannot work ahead: no straight line holds for all of it. For each size, by the quarter of a doubling, with drafts and
without, the logarithm of seen over fitted is remembered, and slowly forgotten: a size nobody has seen for long is
believed to be as good as the line says, and so tried again.
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


class DecodeTimes:
    """An engine's `DecodeCost`."""

    def __init__(self) -> None:
        self._cost = StepCost()
        self._log_ratios = np.zeros((2, _NUM_SIZES))
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
        seen = log(step_ms / max(cost.step_ms(shape), 1e-6))
        self._log_ratios *= _KEEP
        self._weights *= _KEEP
        self._weights[place] += 1
        learning = max(_LEARNING, 1 / self._weights[place])
        self._log_ratios[place] += learning * (min(max(seen, -_FARTHEST), _FARTHEST) - self._log_ratios[place])

    def steps_ms(self, num_decodes: int, context: int, num_drafts: NDArray[np.int64]) -> NDArray[np.float64]:
        cost = self._cost
        plain = cost.step_ms(StepShape(num_decodes=num_decodes, decode_tokens=context))
        line = np.maximum(plain + cost.draft_ms * num_drafts, 1e-6)
        return line * np.exp(self._log_ratios[(num_drafts > 0).astype(np.int64), _size(num_decodes + num_drafts)])


def _size(num_rows: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.minimum(np.rint(4 * np.log2(np.maximum(num_rows, 1))), _NUM_SIZES - 1).astype(np.int64)
