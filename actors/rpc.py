"""gRPC without protobuf: generic handlers and channels that carry msgpack frames of msgspec structs.

One place for method names, channel options and codecs, shared by workers and gateways.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import msgspec

from baton.actors.messages import Frame, ToWorker

SERVICE = "baton.Worker"
SERVE = f"/{SERVICE}/Serve"  # stream of ToWorker -> stream of Frame; one per gateway-worker pair
HANDOVER = f"/{SERVICE}/Handover"  # stream of wire messages both ways; one per decode-prefill pair

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 2000),
    # A process that dies is heard of at once: this is for hosts that vanish. A busy one must not be taken for such.
    ("grpc.keepalive_timeout_ms", 6000),
    ("grpc.http2.max_ping_strikes", 0),  # pings that a busy machine held up come in a bunch: no reason to hang up
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.so_reuseport", 0),  # a new life at an old address proves the old one dead: two must never share a port
]

encode = msgspec.msgpack.Encoder().encode
decode_frame: Callable[[bytes], Frame] = msgspec.msgpack.Decoder(Frame).decode
decode_to_worker: Callable[[bytes], ToWorker] = msgspec.msgpack.Decoder(ToWorker).decode

Behavior = Callable[[AsyncIterator[Any], "grpc.aio.ServicerContext[Any, Any]"], AsyncIterator[Any]]


def open_channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def open_stream(
    channel: grpc.aio.Channel,
    method: str,
    requests: AsyncIterable[Any],
    decoder: Callable[[bytes], Any],
) -> grpc.aio.StreamStreamCall[Any, Any]:
    """Open a bidirectional stream; iterate the call to read, close `requests` or cancel the call to end it."""
    call = channel.stream_stream(method, request_serializer=encode, response_deserializer=decoder)
    return call(requests)  # pyright: ignore[reportArgumentType]


def make_server(methods: dict[str, tuple[Behavior, Callable[[bytes], Any]]]) -> grpc.aio.Server:
    """Build a server; `methods` maps a method path to its behavior and the decoder of what it receives."""
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    handlers = {
        path.rsplit("/", 1)[1]: grpc.stream_stream_rpc_method_handler(
            behavior, request_deserializer=decoder, response_serializer=encode
        )
        for path, (behavior, decoder) in methods.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    return server
