"""Messages of one hand-over stream between a decode worker D (the caller) and a prefill worker P.

A hand-over is named by the request's id. Each attempt has an epoch, which counts up over all attempts of one life of
D and so names the attempt alone; messages of another epoch are ignored. Within a stream, order is kept; a hand-over
does not outlive its stream. Request and result travel as opaque msgpack (`Raw`): transfer knows blocks, not tokens.

    D                                        P
    Hello  ------------------------------->       incarnation, layout, memory
           <------------------------------- Hello
    Open   ------------------------------->       queue the prefill
           <------------------------------- Admitted    its first chunk is scheduled
    Place (or Hold, later Place) --------->       where the blocks go
           <=========== writes ============       chunk by chunk, over the mover
           <------------------------------- Prefilled   first token; how many writes make the whole
    Landed ------------------------------->       P may let go of its blocks
    Abort  ------------------------------->       instead of any of the above
           <------------------------------- Stopped     no write of this epoch will happen any more
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from baton.transfer.mover import Incarnation, MemoryDescriptor


class Attempt(NamedTuple):
    """The name of one attempt to hand a request over, the same on both sides; `peer` is the other side's life."""

    peer: Incarnation
    handover: str
    epoch: int

    @property
    def name(self) -> str:
        """Name the attempt in one string, unique in this process: for an engine that knows only request ids."""
        return f"{self.handover}#{self.epoch}@{self.peer}"


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What both sides must share for a block's bytes to mean the same; compared field by field at the handshake."""

    model: str
    weights_version: str
    dtype: str
    block_size: int
    num_layers: int  # draft layers included
    num_kv_heads: int  # on all ranks together
    head_dim: int
    attention_scale: float
    rope: str  # canonical text of every RoPE parameter
    tensor_parallel: int = 1  # ranks that the heads are split over
    drafter: str = ""  # kind and weights of the draft module that owns the last layers; "" = none does


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    incarnation: str
    worker_id: str
    layout: KVLayout
    memory: MemoryDescriptor


class Open(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Compute the KV of a prompt of `num_blocks` blocks; D already holds the first `skip_blocks` of them."""

    handover: str
    epoch: int
    skip_blocks: int
    num_blocks: int
    request: msgspec.Raw


class Place(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """D's block numbers for the prompt's blocks skip_blocks..num_blocks."""

    handover: str
    epoch: int
    blocks: tuple[int, ...]


class Hold(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """D has no room: keep the blocks under the lease until a Place comes."""

    handover: str
    epoch: int


class Landed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    handover: str
    epoch: int


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Give up this attempt. May overtake its Open; answered by Stopped in every case."""

    handover: str
    epoch: int


class Admitted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    handover: str
    epoch: int


class Prefilled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The prompt is computed. The KV has landed when Arrivals of `num_writes` writes of this epoch were seen.

    Sent as soon as the first token is known; `num_writes` is None while D has not named a place (a second Prefilled
    with the count follows the last write's post).
    """

    handover: str
    epoch: int
    num_writes: int | None
    result: msgspec.Raw


class Stopped(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    handover: str
    epoch: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """P cannot serve this attempt; no write of this epoch will happen any more."""

    handover: str
    epoch: int
    error: str


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Renews every lease of the stream's hand-overs. Sent both ways when nothing else was for a while."""


Message = Hello | Open | Place | Hold | Landed | Abort | Admitted | Prefilled | Stopped | Failed | Beat

decode_message: Callable[[bytes], Message] = msgspec.msgpack.Decoder(Message).decode


class WriteTag(msgspec.Struct, frozen=True, array_like=True):
    """What a mover carries with each write of an attempt, so that its Arrival and Completion name themselves."""

    handover: str
    epoch: int
    number: int  # 0..num_writes-1 within the attempt


encode_tag: Callable[[WriteTag], bytes] = msgspec.msgpack.Encoder().encode
decode_tag: Callable[[bytes], WriteTag] = msgspec.msgpack.Decoder(WriteTag).decode
