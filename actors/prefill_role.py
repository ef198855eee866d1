"""The prefill side of hand-overs: joins the engine, the mover and the decode peers' streams.

All decisions are `HandoverSource`'s; this module only carries out its actions. Lives in the asyncio loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

import msgspec

from baton.actors import rpc
from baton.actors.engine.request import Request
from baton.actors.engine.updates import Update
from baton.actors.messages import PrefillResult
from baton.actors.peer_session import PeerSession
from baton.actors.step_loop import StepLoop
from baton.transfer.layout import check_layout
from baton.transfer.mover import Completion, Incarnation
from baton.transfer.mover_loop import MoverLoop
from baton.transfer.source import CancelPrefill, HandoverSource, Prefill, Release, Send, SourceAction, Write
from baton.transfer.wire import Hello, Message, Open

log = logging.getLogger(__name__)
decode_request = msgspec.msgpack.Decoder(Request).decode


@dataclass(slots=True)
class _Export:
    """One prefill under way for a peer: what its result will need."""

    opened: float
    started: float | None = None
    cached_tokens: int = 0
    tokens: list[int] = field(default_factory=list[int])


class PrefillRole:
    """Serves every decode peer that opens a hand-over stream."""

    def __init__(self, steps: StepLoop, movers: MoverLoop, hello: Hello, source: HandoverSource, beat_s: float) -> None:
        self._steps = steps
        self._movers = movers
        self._hello = hello
        self._source = source
        self._beat_s = beat_s
        self._sessions: dict[Incarnation, PeerSession] = {}
        self._exports: dict[str, _Export] = {}
