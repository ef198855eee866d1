"""The promise that KV can be pulled: plain numbers that may go through gateways and routers to any peer.

Holding a ticket gives no connection: the holder handshakes with the owner's incarnation, then reads its blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from baton.transfer.layout import check_layout
from baton.transfer.mover import Incarnation, TransferError
from baton.transfer.wire import Attempt, KVLayout


class KVTicket(msgspec.Struct, frozen=True, kw_only=True):
    worker_id: str
    incarnation: Incarnation
    handover: str
    epoch: int
    blocks: tuple[int, ...]  # the owner's block numbers, in token order
    layout: KVLayout
    remaining_s: float  # of the owner's lease when the ticket was sent; clocks are never compared across processes

    @property
    def attempt(self) -> Attempt:
        return Attempt(self.incarnation, self.handover, self.epoch)

    def ends_at(self, now: float) -> float:
        """Rebase the deadline on the receiver's clock; `now` is when the ticket was received."""
        return now + self.remaining_s

    def check(self, layout: KVLayout, incarnation: Incarnation) -> None:
        """Refuse a ticket of another life of its owner (TransferError) or of another layout (LayoutMismatch)."""
        if incarnation != self.incarnation:
            raise TransferError(
                f"ticket of {self.handover} is of {self.worker_id}'s incarnation {self.incarnation}, "
                f"but it now lives as {incarnation}; its KV is gone, recompute"
            )
        check_layout(layout, self.layout)


encode_ticket: Callable[[KVTicket], bytes] = msgspec.msgpack.Encoder().encode
decode_ticket: Callable[[bytes], KVTicket] = msgspec.msgpack.Decoder(KVTicket).decode
