"""Request bodies from the wire to validated models: bounded, and never parsed here when parsing would take long."""

from __future__ import annotations

from starlette.requests import Request

from baton.router.errors import BodyTooLarge, InvalidRequest, Overloaded
from baton.router.heavy_lane import HeavyLane
from baton.router.openai_models import Fields, parse_body

INLINE_BYTES = 256 * 1024  # what any JSON of this size costs to parse holds nobody up: under 20 ms


class BodyReader:
    def __init__(self, *, max_bytes: int, max_held_bytes: int, longest_token: int, lane: HeavyLane | None) -> None:
        """`max_bytes` bounds one body, `max_held_bytes` all that are being read. `longest_token` is in bytes.

        Without a lane, bodies of all sizes are parsed here.
        """
        self._max_bytes = max_bytes
        self._max_held_bytes = max_held_bytes
        self._num_held_bytes = 0
        self._longest_token = longest_token
        self._lane = lane

    async def read(self, endpoint: str, model: type[Fields], request: Request, context: int | None) -> Fields:
        """Raises InvalidRequest, or BodyTooLarge or Overloaded as soon as a length passes its limit."""
        chunks: list[bytes] = []
        try:
            await self._read_into(chunks, request)
            if self._lane is None or sum(map(len, chunks)) <= INLINE_BYTES:
                return parse_body(model, b"".join(chunks))
            # Fewer characters than this may still be too many tokens; more cannot be few enough.
            max_chars = self._max_bytes if context is None else context * self._longest_token
            return parse_body(model, await self._lane.canonical(endpoint, chunks, max_chars))
        finally:
            self._num_held_bytes -= sum(map(len, chunks))

    async def _read_into(self, chunks: list[bytes], request: Request) -> None:
        content_type = request.headers.get("content-type", "application/json")
        if content_type.split(";")[0].strip().lower() != "application/json":
            raise InvalidRequest("the body must be JSON: send content-type: application/json")
        too_large = BodyTooLarge(f"the body is larger than the limit of {self._max_bytes} bytes: send less")
        announced = request.headers.get("content-length", "0")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            raise too_large
        length = 0
        async for chunk in request.stream():
            length += len(chunk)
            if length > self._max_bytes:
                raise too_large
            chunks.append(chunk)
            self._num_held_bytes += len(chunk)
            if self._num_held_bytes > max(self._max_held_bytes, length):
                raise Overloaded("too many large requests are being read: try again in 1 s", retry_after_s=1)
