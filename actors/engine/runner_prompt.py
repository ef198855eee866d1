# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Reads off a step's hidden states what requests ask about their prompts: log-probabilities and pooled states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from baton.actors.engine.batch import Admission, Row
from baton.actors.engine.host_copy import HostCopy
from baton.actors.engine.models.model import Model
from baton.actors.engine.prompt_record import PromptPart
from baton.actors.engine.request import Request, TokenLogprobs
from baton.kernels.sampling import Logprobs, token_logprobs

PIECE = 256  # tokens whose logits are held at once: a vocabulary's worth of floats each


class PromptReader:
    """Knows which slots still compute a prompt that is asked about."""

    def __init__(self, model: Model, to_device: Callable[[Sequence[int]], torch.Tensor]) -> None:
        self._model = model
        self._to_device = to_device
        self._asking: dict[int, Request] = {}  # by slot

    def admit(self, admissions: Sequence[Admission]) -> None:
        for admission in admissions:
            self._asking.pop(admission.slot, None)
            if admission.request.prompt is not None and len(admission.tokens) == admission.request.prompt_len:
                self._asking[admission.slot] = admission.request

    def is_asked(self, rows: Sequence[Row]) -> bool:
        return bool(self._asking) and any(self._request(row) is not None for row in rows)

    def read(self, rows: Sequence[Row], hidden: torch.Tensor) -> PendingParts | None:
        """hidden: [num_tokens, hidden_size], of all rows in order."""
        if not self.is_asked(rows):
            return None
        parts: dict[int, _Part] = {}
        first = 0
        for index, row in enumerate(rows):
            if (request := self._request(row)) is not None:
                parts[index] = self._part(request, row, hidden[first : first + row.num_tokens])
            first += row.num_tokens
        return PendingParts(parts)

    def _request(self, row: Row) -> Request | None:
        request = self._asking.get(row.slot)
        return request if request is not None and row.start < len(request.tokens) else None

    def _part(self, request: Request, row: Row, hidden: torch.Tensor) -> _Part:
        params = request.prompt
        assert params is not None
        logprobs: list[HostCopy] = []
        if params.logprobs is not None:
            targets = request.tokens[row.start + 1 : row.end + 1]
            for start in range(0, len(targets), PIECE):
                ids = self._to_device(targets[start : start + PIECE])
                logits = self._model.logits(hidden[start : start + len(ids)])
                logprobs.append(HostCopy(token_logprobs(logits, ids, params.logprobs)))
        pooled = None
        if params.pooling == "mean":
            pooled = self._model.normed(hidden).float().sum(dim=0)
        elif params.pooling == "last" and row.sample:
            pooled = self._model.normed(hidden[-1:]).float()[0]
        return _Part(row.start, logprobs, None if pooled is None else HostCopy((pooled,)))


@dataclass(frozen=True, slots=True)
class _Part:
    start: int
    logprobs: list[HostCopy]  # of kernels.sampling.Logprobs, a piece each
    pooled: HostCopy | None

    def wait(self) -> PromptPart:
        logprobs = tuple(entry for piece in self.logprobs for entry in scored(Logprobs(*piece.wait())))
        pooled = b"" if self.pooled is None else self.pooled.wait()[0].numpy().tobytes()
        return PromptPart(start=self.start, logprobs=logprobs, pooled=pooled)


@dataclass(frozen=True, slots=True)
class PendingParts:
    parts: dict[int, _Part]  # by the row's index

    def wait(self) -> dict[int, PromptPart]:
        return {index: part.wait() for index, part in self.parts.items()}


def scored(logprobs: Logprobs) -> list[TokenLogprobs]:
    """Make one entry for each row; the tensors are on the host."""
    chosen: list[float] = logprobs.chosen.tolist()
    top_ids: list[list[int]] = logprobs.top_ids.tolist()
    top: list[list[float]] = logprobs.top.tolist()
    return [TokenLogprobs(*entry) for entry in zip(chosen, map(tuple, top_ids), map(tuple, top), strict=True)]
