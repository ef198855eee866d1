"""Bookkeeping that can never fail what it is about."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")

logger = logging.getLogger(__name__)


def never_fails(record: Callable[P, None]) -> Callable[P, None]:
    """Log what `record` raises instead of raising it: neither a request nor a step must die of its metrics."""

    @functools.wraps(record)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            record(*args, **kwargs)
        except Exception:  # whatever it is
            logger.exception("%s failed", record.__qualname__)

    return guarded
