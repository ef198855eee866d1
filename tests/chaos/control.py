"""What a test says to a chaos process and hears from it: JSON lines over a socket pair."""

from __future__ import annotations

import msgspec

from baton.actors.engine.request import Request
from baton.actors.messages import PeerAddress, WorkerInfo
from tests.chaos.gates import GateSpec


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker process is started; `config` is a WorkerConfig as JSON."""

    worker_id: str
    role: str
    config: str
    port: int = 0


# To a worker.


class OpenGates(msgspec.Struct, frozen=True, tag=True):
    """Let everything that is held go on."""


class PeerDead(msgspec.Struct, frozen=True, tag=True):
    """What the cluster says when a process is known to be gone."""

    incarnation: str


class DropPeers(msgspec.Struct, frozen=True, tag=True):
    """Close the streams to prefill workers, so that the next request connects anew."""


class AskState(msgspec.Struct, frozen=True, tag=True):
    pass


class HangEngine(msgspec.Struct, frozen=True, tag=True):
    """Block the engine's thread as long as the process lives."""


# To a gateway.


class Generate(msgspec.Struct, frozen=True, tag=True):
    request: Request
    prefill: PeerAddress | None
    decodes: tuple[WorkerInfo, ...]


Command = GateSpec | OpenGates | PeerDead | DropPeers | AskState | HangEngine | Generate


class Started(msgspec.Struct, frozen=True, tag=True):
    info: WorkerInfo | None  # None for a gateway


class Reached(msgspec.Struct, frozen=True, tag=True):
    gate: GateSpec


class State(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Everything that a worker could leak, counted after a check of every block."""

    total: int
    free: int
    cached: int
    held: int
    num_live: int
    num_exports: int
    num_imports: int
    num_quarantined: int
    num_gateways: int  # streams
    num_prefill_peers: int  # streams to them
    num_decode_peers: int  # streams from them

    @property
    def is_whole(self) -> bool:
        held = self.held + self.num_live + self.num_exports + self.num_imports + self.num_quarantined
        return not held and self.free + self.cached == self.total


class Answered(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """How a request ended at its client; `finish` is the worker's last word."""

    request_id: str
    tokens: tuple[int, ...]
    finish: str
    error: str | None
    prefill_worker: str | None
    decode_worker: str | None
    num_streams: int  # over which it came: more than one after a fail-over


Answer = Started | Reached | State | Answered

encode = msgspec.json.Encoder().encode
decode_command = msgspec.json.Decoder(Command).decode
decode_answer = msgspec.json.Decoder(Answer).decode
