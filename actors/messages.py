"""Every message between a gateway and a worker, and the `Worker` protocol: the cluster's narrow waist.

Messages are frozen msgspec structs, sent as msgpack; decoding validates types. Messages between a prefill and a
decode worker live in `baton.transfer.wire`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Literal, Protocol

import msgspec

from baton.actors.engine.request import FinishReason, PromptOutput, Request, TokenLogprobs
from baton.actors.step_cost import StepCost

Role = Literal["prefill", "decode", "both"]


class PeerAddress(msgspec.Struct, frozen=True):
    """Where a worker listens, and which life of it is meant: a restarted worker has a new incarnation."""

    worker_id: str
    address: str  # host:port of its gRPC server
    incarnation: str


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    peer: PeerAddress
    role: Role
    model: str
    block_size: int
    num_blocks: int
    max_context: int  # tokens, prompt and output together
    max_sequences: int = 256  # that run at once
    step_tokens: int = 2048  # that one step computes at most
    mover: str
    metrics_address: str  # host:port of its Prometheus endpoint
    pid: int
    version: str = ""  # of the weights: workers of different ones cannot hand over to each other


# Gateway to worker.


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Generate `request` here. With `prefill`, ask that worker for the prompt's KV; without, prefill locally."""

    request: Request
    prefill: PeerAddress | None = None


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """The client is gone. Also sent for ids the worker never saw; both are fine."""

    request_id: str


class Resync(msgspec.Struct, frozen=True, tag=True):
    """The gateway missed a frame: send a KV snapshot."""


ToWorker = Submit | Cancel | Resync

# Worker to gateway.


class PhaseTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that one request spent in each phase up to decode's first own step; each measured inside one process."""

    queue_s: float = 0.0  # accepted by the worker that prefills -> its first chunk starts
    prefill_s: float = 0.0  # first chunk starts -> first token sampled
    handover_s: float = 0.0  # first token known to decode -> all KV adopted; 0 without hand-over
    first_step_s: float = 0.0  # adopted -> decode's first own token


class PrefillResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a prefill worker found for a request; travels opaquely in `Prefilled.result` of the hand-over stream."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cached_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    drafts: tuple[int, ...] = ()  # what may follow the token, for decode's first step


class ServedBy(msgspec.Struct, frozen=True, kw_only=True):
    """Who served a request and what was moved for it; sent once, with the request's last output."""

    decode_worker: str
    prefill_worker: str  # equals decode_worker when nothing was handed over
    mover: str = "none"
    blocks_moved: int = 0
    bytes_moved: int = 0
    times: PhaseTimes = PhaseTimes()


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What one step gave one request. `finish` is set exactly once, on its last output."""

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cached_tokens: int | None = None  # prompt tokens not computed anew; set on the first output
    prompt: PromptOutput | None = None  # likewise, if the request asked for it
    finish: FinishReason | None = None
    error: str | None = None  # for finish == "error"
    is_refusal: bool = False  # the error is the client's to mend: its grammar cannot be honoured
    served: ServedBy | None = None


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's own view of its load, after the step that the frame reports."""

    num_running: int = 0
    num_waiting: int = 0
    num_importing: int = 0  # their prompt's KV is computed by a peer, or on its way
    waiting_tokens: int = 0  # uncached prompt tokens not yet computed
    waiting_context: float = 0.0  # sum over these of the positions that each attends to
    prefill_share: float = 0.0  # of its time, lately, that went into prefill
    blocks_free: int = 0
    blocks_cached: int = 0
    blocks_held: int = 0
    cost: StepCost | None = None  # what its steps cost, once it has fitted some


class KVEvents(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks (by chained content hash) that became matchable or ceased to be. `snapshot`: `stored` is everything."""

    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    snapshot: bool = False


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """All news for one gateway since the last frame. `number` counts up by one per stream, from 0 (a snapshot)."""

    number: int
    incarnation: str
    outputs: tuple[Output, ...] = ()
    load: Load = Load()
    events: KVEvents = KVEvents()


class Worker(Protocol):
    """What the cluster may ask of a worker, whatever its role. Called from the worker's asyncio loop."""

    async def generate(self, submit: Submit) -> AsyncIterator[Output]:
        """Yield the request's outputs, ending with the one that has `finish`; closing the iterator cancels."""
        ...

    async def prefill(self, calls: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Serve one decode peer's hand-over stream (messages of `baton.transfer.wire`)."""
        ...

    def cancel(self, request_id: str) -> None: ...

    async def drain(self, wait_s: float) -> None:
        """Refuse new work; let the running work end for `wait_s`, then hand it back to be gone on with elsewhere."""
        ...

    def info(self) -> WorkerInfo: ...
