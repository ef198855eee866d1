"""What counts as served well: targets for the first token and for those after it, by class, key or request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from baton.router.config import SloConfig
from baton.router.errors import InvalidRequest

CLASS = "x-baton-slo"
TTFT_MS = "x-baton-ttft-ms"
ITL_MS = "x-baton-itl-ms"
SESSION = "x-session-id"
CUSTOM = "custom"  # the class of requests that bring targets of their own: metrics need few labels


@dataclass(frozen=True, slots=True)
class SloTargets:
    """`itl_s` is for the mean time between a sequence's tokens. None: whatever it takes."""

    name: str = "default"
    ttft_s: float | None = None
    itl_s: float | None = None

    def verdict(self, ttft_s: float, itl_s: float | None) -> str:
        """Say `met`, or which target was missed first."""
        if self.ttft_s is not None and ttft_s > self.ttft_s:
            return "ttft"
        if self.itl_s is not None and itl_s is not None and itl_s > self.itl_s:
            return "itl"
        return "met"


@dataclass(frozen=True, slots=True)
class Terms:
    """On what terms a call is served: whose share it takes (the name of its API key), its targets, its session."""

    key: str = ""
    slo: SloTargets = SloTargets()
    session: str = ""  # requests of one session like to meet again on a worker


class SloClasses:
    def __init__(self, config: SloConfig) -> None:
        self._classes = {
            name: SloTargets(name, _seconds(targets.ttft_ms), _seconds(targets.itl_ms))
            for name, targets in config.classes.items()
        }
        self._default = self._classes.get(config.default, SloTargets(config.default))
        self._by_key = {key: self._classes[name] for key, name in config.keys.items()}

    def terms(self, headers: Mapping[str, str], key: str) -> Terms:
        return Terms(key, self.choose(headers, key), headers.get(SESSION, ""))

    def choose(self, headers: Mapping[str, str], key: str = "") -> SloTargets:
        """Return the targets that a request's headers ask for, or else its key's. Raises InvalidRequest."""
        targets = self._by_key.get(key, self._default)
        if (name := headers.get(CLASS)) is not None:
            if name not in self._classes:
                raise InvalidRequest(f"{CLASS} names no class of this server: use one of {sorted(self._classes)}")
            targets = self._classes[name]
        ttft_ms, itl_ms = _milliseconds(headers, TTFT_MS), _milliseconds(headers, ITL_MS)
        if ttft_ms is None and itl_ms is None:
            return targets
        ttft_s = targets.ttft_s if ttft_ms is None else ttft_ms / 1e3
        return SloTargets(CUSTOM, ttft_s, targets.itl_s if itl_ms is None else itl_ms / 1e3)


def _milliseconds(headers: Mapping[str, str], name: str) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise InvalidRequest(f"{name} must be a positive number of milliseconds")
    return value


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
