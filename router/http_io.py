"""The edges of an HTTP call: JSON or events out, and noticing that the client has left."""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, NamedTuple, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.router.errors import BodyTooLarge, RouterError
from baton.router.formats import encode

REQUEST_ID = "x-request-id"
LINGER_S = 1.0
CLIENT_CLOSED = 499  # never sent: nobody is there to read it

T = TypeVar("T")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do `work`, cancelling it when the client leaves. Raises ClientDisconnect then."""
    task = asyncio.current_task()
    assert task is not None
    has_left, is_over = False, False

    def leave(watcher: asyncio.Task[None]) -> None:
        nonlocal has_left
        if not is_over:
            has_left = True
            task.cancel()

    watcher = asyncio.create_task(_wait_disconnect(receive))
    watcher.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if has_left and task.uncancel() == 0:  # nobody else has cancelled it too
            raise ClientDisconnect from None
        raise
    finally:
        is_over = True
        watcher.cancel()


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    body = content if isinstance(content, bytes) else encode(content)
    return Response(body, status, headers, media_type="application/json")


ErrorBody = Callable[[RouterError], dict[str, object]]


def error_response(
    error: RouterError, headers: Mapping[str, str] | None = None, body: ErrorBody = RouterError.body
) -> Response:
    retry = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    kind = HangUp if isinstance(error, BodyTooLarge) else Response
    return kind(encode(body(error)), error.status, {**(headers or {}), **retry}, media_type="application/json")


class HangUp(Response):
    """A whole answer to a request that is still being sent; then the connection closes.

    What still comes is thrown away for a moment: closing at once would reset the connection, and a client that
    sends before it reads would lose the answer.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers["connection"] = "close"
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while (await receive()).get("more_body"):
                    pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def reply_headers(request: Request) -> dict[str, str]:
    """Echo the client's request id if it is harmless, else make one. It is a label only, never a key."""
    given = request.headers.get(REQUEST_ID, "")
    return {REQUEST_ID: given if re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", given) else uuid.uuid4().hex}


class Events(NamedTuple):
    data: bytes  # one or more whole events
    is_last: bool


class EventStream(Response):
    """Server-sent events, one write for each item of `events`.

    The status line waits for the first item, so an error before it is a plain HTTP error. `on_end` gets the status
    in every case; a client that leaves closes `events` at once.
    """

    def __init__(
        self,
        events: AsyncGenerator[Events, None],
        headers: Mapping[str, str],
        error_body: ErrorBody,
        on_end: Callable[[int, str | None], None],
    ) -> None:
        super().__init__(None, headers={**headers, "cache-control": "no-cache"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events = events
        self._error_body = error_body
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, reason = 500, "internal_error"
        try:
            status, reason = await while_connected(receive, self._send_all(scope, receive, send))
        except ClientDisconnect:
            status, reason = CLIENT_CLOSED, "client_closed"
        finally:
            self._on_end(status, reason)

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> tuple[int, str | None]:
        async with aclosing(self._events) as events:
            try:
                first = await anext(events)
            except RouterError as error:
                headers = {REQUEST_ID: self.headers[REQUEST_ID]}
                await error_response(error, headers, self._error_body)(scope, receive, send)
                return error.status, error.code
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first.data, "more_body": not first.is_last})
            async for event in events:
                await send({"type": "http.response.body", "body": event.data, "more_body": not event.is_last})
        return 200, None
