"""How much may wait for its first token at this gateway: bounded in sequences and in prompt tokens.

Beyond the bounds a request is refused at once, before any prefill is spent on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from baton.router.errors import Overloaded

MAX_RETRY_AFTER_S = 60
SMOOTHING = 0.1  # weight of the newest waiting time in their average


class Admission:
    def __init__(self, *, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._average_wait_s = 1.0
        self.num_requests = 0
        self.num_tokens = 0

    def enter(self, prompt_lens: Sequence[int]) -> list[Place]:
        """Take a place for each sequence of one call, all or none. An empty queue takes any one call.

        Raises Overloaded when they do not fit.
        """
        if self.num_requests and self.num_requests + len(prompt_lens) > self._max_requests:
            raise self._refusal(f"{self.num_requests} requests are waiting, the limit is {self._max_requests}")
        if self.num_requests and self.num_tokens + sum(prompt_lens) > self._max_tokens:
            raise self._refusal(f"{self.num_tokens} prompt tokens are waiting, the limit is {self._max_tokens}")
        return [Place(self, prompt_len) for prompt_len in prompt_lens]

    def note_wait(self, seconds: float) -> None:
        """Learn how long one request waited for its first token: what `Retry-After` is made of."""
        self._average_wait_s += SMOOTHING * (seconds - self._average_wait_s)

    def _refusal(self, reason: str) -> Overloaded:
        retry_after_s = min(max(math.ceil(self._average_wait_s), 1), MAX_RETRY_AFTER_S)
        return Overloaded(f"{reason}: try again in {retry_after_s} s", retry_after_s=retry_after_s)


class Place:
    """One sequence's place in the queue; leaving it is idempotent."""

    def __init__(self, admission: Admission, num_tokens: int) -> None:
        self._admission: Admission | None = admission
        self._num_tokens = num_tokens
        admission.num_requests += 1
        admission.num_tokens += num_tokens

    def leave(self) -> None:
        if self._admission is not None:
            self._admission.num_requests -= 1
            self._admission.num_tokens -= self._num_tokens
            self._admission = None
