"""What is written to a client, and in how many writes."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from baton.router.http_protocol import GatheringTransport


class Wire:
    """Stands for a socket's transport."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        assert not self.is_closed
        self.writes.append(data)

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


def gathering(wire: Wire) -> GatheringTransport:
    return GatheringTransport(cast(Any, wire))


async def test_a_head_and_what_follows_are_one_write_at_once() -> None:
    wire = Wire()
    transport = gathering(wire)
    transport.write(b"head ")
    transport.write(b"first")
    assert wire.writes == [b"head first"]


async def test_a_single_write_goes_when_the_round_is_over_and_all_keep_their_order() -> None:
    wire = Wire()
    transport = gathering(wire)
    for data in (b"1", b"2", b"3"):
        transport.write(data)
    assert wire.writes == [b"12"]
    await asyncio.sleep(0)
    assert wire.writes == [b"12", b"3"]


async def test_what_is_held_is_sent_before_the_connection_closes() -> None:
    wire = Wire()
    transport = gathering(wire)
    transport.write(b"last")
    transport.close()
    await asyncio.sleep(0)
    assert wire.writes == [b"last"] and wire.is_closed


async def test_nothing_is_written_to_a_connection_that_has_gone() -> None:
    wire = Wire()
    transport = gathering(wire)
    transport.write(b"late")
    wire.close()
    await asyncio.sleep(0)
    assert wire.writes == []
