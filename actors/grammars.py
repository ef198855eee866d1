"""A worker's grammars: tried out in a process of their own, then compiled here, for the sequences that need them.

Lives in the asyncio loop; the engine's thread finds what is compiled in the GrammarStore.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Protocol

from baton.actors.engine.grammar import GrammarStore
from baton.actors.grammar_process import CompilerSeat, Job, Verdict, compile_main, decode_verdict, encode_job

if TYPE_CHECKING:
    import xgrammar

STOP_S = 2.0


class GrammarRefused(Exception):
    """The grammar cannot be honoured: the client must change it. The message says why."""


class CompilerLost(Exception):
    """The compiling process has ended. The next grammar starts another one."""


class Grammars(Protocol):
    async def compiled(self, text: str) -> xgrammar.CompiledGrammar | None:
        """Return the grammar: while the caller holds it, the engine has it. Raises GrammarRefused or CompilerLost."""
        ...

    async def close(self) -> None: ...


class NoGrammars:
    """Of a worker whose model has no vocabulary."""

    async def compiled(self, text: str) -> None:
        raise GrammarRefused("this worker cannot constrain its output")

    async def close(self) -> None:
        pass


class WorkerGrammars:
    def __init__(self, store: GrammarStore, seat: Callable[[], CompilerSeat]) -> None:
        """`seat` is asked when the first grammar comes, and the process started."""
        self._store = store
        self._seat = seat
        self._compiling: dict[str, asyncio.Task[xgrammar.CompiledGrammar]] = {}
        self._process: _Process | None = None

    async def compiled(self, text: str) -> xgrammar.CompiledGrammar:
        found = self._store.find(text)
        if found is not None:
            return found
        task = self._compiling.get(text)
        if task is None:
            task = self._compiling[text] = asyncio.create_task(self._compile(text))
            task.add_done_callback(lambda done: self._compiled(text, done))
        return await asyncio.shield(task)

    async def close(self) -> None:
        for task in self._compiling.values():
            task.cancel()
        if self._process is not None:
            await self._process.close()

    async def _compile(self, text: str) -> xgrammar.CompiledGrammar:
        if self._process is None or self._process.is_lost:
            self._process = _Process(self._seat())
        verdict = await self._process.ask(text)
        if verdict.refusal:
            raise GrammarRefused(verdict.refusal)
        return await asyncio.to_thread(self._store.get, text)

    def _compiled(self, text: str, task: asyncio.Task[xgrammar.CompiledGrammar]) -> None:
        del self._compiling[text]
        if not task.cancelled():
            task.exception()  # whoever still waits for it hears of it


class _Process:
    """One life of the compiling process."""

    def __init__(self, seat: CompilerSeat) -> None:
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=compile_main, args=(theirs, seat), name="grammar-compiler", daemon=True
        )
        self._process.start()
        theirs.close()  # so that its end ends the line
        self._asked: dict[int, asyncio.Future[Verdict]] = {}
        self._num_asked = 0
        self._sending = asyncio.Lock()  # a long job goes out in many pieces, from a thread
        self.is_lost = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._line.fileno(), self._read)

    async def ask(self, text: str) -> Verdict:
        self._num_asked += 1
        future = self._asked[self._num_asked] = self._loop.create_future()
        job = encode_job(Job(self._num_asked, text))
        try:
            async with self._sending:
                await asyncio.to_thread(self._line.send_bytes, job)
        except OSError:
            self._lose()
        return await future

    async def close(self) -> None:
        self._lose()
        await asyncio.to_thread(self._process.join, STOP_S)
        self._process.kill()

    def _read(self) -> None:
        try:
            verdict = decode_verdict(self._line.recv_bytes())
        except (EOFError, OSError):
            self._lose()
            return
        future = self._asked.pop(verdict.number)
        if not future.done():
            future.set_result(verdict)

    def _lose(self) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        self._loop.remove_reader(self._line.fileno())
        self._line.close()
        for future in self._asked.values():
            if not future.done():
                future.set_exception(CompilerLost("the process that compiles grammars has ended; send it again"))
        self._asked.clear()
