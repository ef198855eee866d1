"""Who may call, and how much: API keys known by their hashes, each with limits of its own.

A key is counted at this gateway alone. Keys never appear in errors, logs or metrics; their names may.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Protocol

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from baton.router.errors import RateLimited, Unauthorized

Limit = Annotated[int, Field(ge=1)] | None  # None = no limit


class ApiKey(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(min_length=1, max_length=64)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]  # of the key: printf %s KEY | sha256sum
    requests_per_minute: Limit = None
    tokens_per_minute: Limit = None  # prompt and output; counted when a request ends
    max_concurrent: Limit = None


def read_keys(path: Path) -> list[ApiKey]:
    """Read a YAML list of keys."""
    return TypeAdapter(list[ApiKey]).validate_python(yaml.safe_load(path.read_text()))


def make_door(keys: Sequence[ApiKey], file: Path | None) -> Door:
    """Admit those with one of `keys` or of the file's, or everybody when there are none in all."""
    every = [*keys, *(read_keys(file) if file is not None else ())]
    return KeyedDoor(every) if every else OpenDoor()


class Visit(Protocol):
    """One admitted call."""

    @property
    def name(self) -> str:
        """The key's, or an empty one where no keys are wanted."""
        ...

    def leave(self, num_tokens: int) -> None:
        """Count the call's tokens and give its place back; once."""
        ...


class Door(Protocol):
    def enter(self, headers: Mapping[str, str]) -> Visit:
        """Raises Unauthorized or RateLimited."""
        ...


class OpenDoor:
    """Everybody may enter."""

    name = ""

    def enter(self, headers: Mapping[str, str]) -> Visit:
        return self

    def leave(self, num_tokens: int) -> None:
        pass


class KeyedDoor:
    def __init__(self, keys: Sequence[ApiKey], clock: Callable[[], float] = time.monotonic) -> None:
        self._accounts = {key.sha256: _Account(key, clock) for key in keys}

    def enter(self, headers: Mapping[str, str]) -> Visit:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not given:
            raise Unauthorized("this server wants an API key: send authorization: Bearer KEY")
        account = self._accounts.get(hashlib.sha256(given.encode("latin-1", "replace")).hexdigest())
        if account is None:
            raise Unauthorized("the API key is not known here: check it, or ask the operator for one")
        return account.enter()


class _Account:
    def __init__(self, key: ApiKey, clock: Callable[[], float]) -> None:
        self.key = key
        self.num_running = 0
        self._requests = _Bucket(key.requests_per_minute, clock)
        self.tokens = _Bucket(key.tokens_per_minute, clock)

    def enter(self) -> Visit:
        key = self.key
        if key.max_concurrent is not None and self.num_running >= key.max_concurrent:
            raise RateLimited(f"this key may run {key.max_concurrent} requests at once: wait for one", retry_after_s=1)
        for bucket, what in ((self.tokens, "tokens"), (self._requests, "requests")):
            if (wait_s := bucket.wait_s()) > 0:
                message = f"this key may use {bucket.per_minute} {what} a minute: try again in {wait_s} s"
                raise RateLimited(message, retry_after_s=wait_s)
        self._requests.take(1)
        self.num_running += 1
        return _KeyVisit(self)


class _KeyVisit:
    def __init__(self, account: _Account) -> None:
        self._account: _Account | None = account
        self.name = account.key.name

    def leave(self, num_tokens: int) -> None:
        if self._account is not None:
            self._account.tokens.take(num_tokens)
            self._account.num_running -= 1
            self._account = None


class _Bucket:
    """A minute's worth at most, refilled evenly. What is taken late may leave it in debt."""

    def __init__(self, per_minute: int | None, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute or 0)
        self._filled_at = clock()

    def wait_s(self) -> int:
        """Return in how many whole seconds at least one is there; 0 = now."""
        if self.per_minute is None:
            return 0
        self._refill(self.per_minute)
        return max(math.ceil((1 - self._level) * 60 / self.per_minute), 0)

    def take(self, amount: int) -> None:
        if self.per_minute is not None:
            self._refill(self.per_minute)
            self._level -= amount

    def _refill(self, per_minute: int) -> None:
        now = self._clock()
        self._level = min(self._level + (now - self._filled_at) * per_minute / 60, per_minute)
        self._filled_at = now
