"""What was asked about a prompt's own tokens, gathered from the chunks in which the prompt was computed."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.actors.engine.request import PromptOutput, PromptParams, TokenLogprobs


class PromptPart(msgspec.Struct, frozen=True, kw_only=True):
    """What one chunk, from `start` on, tells: log-probabilities of the tokens behind each of its own."""

    start: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    pooled: bytes = b""  # [hidden] float32: the chunk's sum, or the last token's state; empty for none


class PromptRecord:
    """One prompt's record. Chunks may come again, from the first on, when the sequence was preempted."""

    def __init__(self, params: PromptParams, prompt_len: int) -> None:
        self.params = params
        self._prompt_len = prompt_len
        self._logprobs: list[TokenLogprobs] = []
        self._pooled: NDArray[np.float32] | None = None

    def take(self, part: PromptPart) -> None:
        if self.params.logprobs is not None:
            del self._logprobs[part.start :]
            self._logprobs += part.logprobs
        if part.pooled:
            state = np.frombuffer(part.pooled, dtype="<f4")
            is_first = self._pooled is None or part.start == 0 or self.params.pooling == "last"
            self._pooled = state if is_first else self._pooled + state

    def output(self) -> PromptOutput:
        pooled = self._pooled
        if pooled is not None and self.params.pooling == "mean":
            pooled = pooled / np.float32(self._prompt_len)
        return PromptOutput(logprobs=tuple(self._logprobs), pooled=b"" if pooled is None else pooled.tobytes())
