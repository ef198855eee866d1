"""A process of its own for bodies and texts so large that handling them here would hold up every other request.

Parsing JSON and running regular expressions hold Python's lock, in whatever thread they run. One large call is worked
on at a time, in order. What comes back is small, or as much text as the context can hold at most.
"""

from __future__ import annotations

import array
import asyncio
import json
import multiprocessing
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from baton.router.errors import InvalidRequest, RouterError
from baton.router.openai_models import parse_body
from baton.router.sampling import check_length

if TYPE_CHECKING:
    from baton.router.tokenizer import Tokenizer


class Canonical(msgspec.Struct, frozen=True, tag=True):
    """Validate a body and write it again with its known fields alone. `max_chars` bounds all of its text.

    The body follows in `num_chunks` messages: whole, it would be copied once more here.
    """

    endpoint: str
    num_chunks: int
    max_chars: int


class EncodeChat(msgspec.Struct, frozen=True, tag=True):
    arguments: bytes  # of Tokenizer.encode_chat_now, as JSON: its numbers may have any size
    context: int | None  # more tokens than it holds are refused there: millions of ids would take long to send


class EncodePrompt(msgspec.Struct, frozen=True, tag=True):
    text: str
    context: int | None


class Done(msgspec.Struct, frozen=True, tag=True):
    result: bytes


class Refused(msgspec.Struct, frozen=True, tag=True):
    message: str
    param: str | None


_encode = msgspec.msgpack.Encoder().encode
_decode_work = msgspec.msgpack.Decoder(Canonical | EncodeChat | EncodePrompt).decode
_decode_answer = msgspec.msgpack.Decoder(Done | Refused).decode


class HeavyLane:
    """Starts its process with the first large call, and anew when it was lost."""

    def __init__(self, model_path: Path) -> None:
        self._model_path = model_path
        self._caller = ThreadPoolExecutor(1, thread_name_prefix="heavy lane")
        self._line: Connection | None = None
        self._process: SpawnProcess | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    async def canonical(self, endpoint: str, chunks: Sequence[bytes], max_chars: int) -> bytes:
        """`chunks` are a body. Raises InvalidRequest."""
        return await self._call(Canonical(endpoint, len(chunks), max_chars), chunks)

    async def encode_chat(self, *arguments: Any, context: int | None = None) -> tuple[int, ...]:
        return _tokens(await self._call(EncodeChat(msgspec.json.encode(arguments), context)))

    async def encode_prompt(self, text: str, context: int | None = None) -> tuple[int, ...]:
        return _tokens(await self._call(EncodePrompt(text, context)))

    def close(self) -> None:
        """End the process, whatever it is doing. Idempotent."""
        with self._lock:
            self._is_closed = True
        self.kill_process()
        self._caller.shutdown(wait=False, cancel_futures=True)

    def kill_process(self) -> None:
        """End the process; what it was doing fails, and the next call starts another."""
        with self._lock:
            if self._process is not None:
                self._process.kill()

    async def _call(self, work: Canonical | EncodeChat | EncodePrompt, chunks: Sequence[bytes] = ()) -> bytes:
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(self._caller, self._call_now, [_encode(work), *chunks])
        if isinstance(answer, Refused):
            raise InvalidRequest(answer.message, param=answer.param)
        return answer.result

    def _call_now(self, messages: Sequence[bytes]) -> Done | Refused:
        try:
            line = self._open()
            for message in messages:
                line.send_bytes(message)
            return _decode_answer(line.recv_bytes())
        except (EOFError, OSError) as error:
            self._line = None
            raise RouterError("the process that reads large requests was lost: try again") from error

    def _open(self) -> Connection:
        if self._line is not None:
            return self._line
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_main, args=(str(self._model_path), theirs), daemon=True)
        with self._lock:
            if self._is_closed:
                raise EOFError("closed")
            process.start()
            self._process = process
        theirs.close()
        self._line = ours
        return ours


def _tokens(data: bytes) -> tuple[int, ...]:
    return tuple(array.array("I", data))


def _main(model_path: str, line: Connection) -> None:
    """Work until the gateway's end of the line is closed, as it is when the gateway dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches us too; the gateway ends us
    from baton.router.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(model_path)
    while True:
        try:
            work = _decode_work(line.recv_bytes())
            chunks = [line.recv_bytes() for _ in range(work.num_chunks)] if isinstance(work, Canonical) else []
        except EOFError:
            return
        try:
            line.send_bytes(_encode(Done(_do(work, b"".join(chunks), tokenizer))))
        except InvalidRequest as error:
            line.send_bytes(_encode(Refused(error.message, error.param)))


def _do(work: Canonical | EncodeChat | EncodePrompt, data: bytes, tokenizer: Tokenizer) -> bytes:
    if isinstance(work, EncodeChat):
        return _packed(tokenizer.encode_chat_now(*json.loads(work.arguments)), work.context, "messages")
    if isinstance(work, EncodePrompt):
        return _packed(tokenizer.encode_prompt_now(work.text), work.context, "prompt")
    from baton.router.bodies import BODIES  # which knows every endpoint, and they the tokenizer, and that this module

    body = parse_body(BODIES[work.endpoint], data)
    if (num_chars := _num_chars(body.model_dump(exclude_unset=True))) > work.max_chars:
        raise InvalidRequest(
            f"the request has {num_chars} characters of text; the context holds {work.max_chars} at the very most: "
            f"shorten it"
        )
    return body.model_dump_json(exclude_unset=True).encode()


def _packed(tokens: Sequence[int], context: int | None, param: str) -> bytes:
    if context is not None:
        check_length(len(tokens), context, param)
    return array.array("I", tokens).tobytes()


def _num_chars(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_num_chars, cast("dict[str, object]", value).values()))
    return sum(map(_num_chars, cast("list[object]", value))) if isinstance(value, list) else 0
