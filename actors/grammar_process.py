"""The process that tries grammars out for a worker: what a client's schema does to the compiler, it does here.

One forked child for each grammar, with limits of processor time and memory, so that neither a crash nor an endless
compilation costs more than itself. A compiler's warning means that it did not take the grammar literally: a refusal.
"""

from __future__ import annotations

import os
import re
import resource
import signal
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import xgrammar

MAX_REASON_LEN = 300


class CompileLimits(msgspec.Struct, frozen=True):
    seconds: int  # of processor time
    num_bytes: int


class CompilerSeat(msgspec.Struct, frozen=True):
    """What the process is given at its start."""

    model: Path
    eos_ids: tuple[int, ...]
    vocab_size: int
    limits: CompileLimits


class Job(msgspec.Struct, frozen=True, array_like=True):
    number: int
    text: str


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    number: int
    refusal: str = ""  # why the grammar cannot be used; empty = it can


encode_job: Callable[[Job], bytes] = msgspec.msgpack.Encoder().encode
_decode_job: Callable[[bytes], Job] = msgspec.msgpack.Decoder(Job).decode
_encode_verdict: Callable[[Verdict], bytes] = msgspec.msgpack.Encoder().encode
decode_verdict: Callable[[bytes], Verdict] = msgspec.msgpack.Decoder(Verdict).decode


def compile_main(line: Connection, seat: CompilerSeat) -> None:
    """Serve jobs from `line` until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the worker decides
    from baton.actors.engine.grammar import make_compiler
    from baton.actors.engine.vocabulary import load_vocabulary

    compiler = make_compiler(load_vocabulary(seat.model, seat.eos_ids), seat.vocab_size)
    running: dict[Connection, tuple[Job, int]] = {}  # with the child's process id
    try:
        while True:
            for ready in wait([line, *running]):
                if ready is line:
                    job = _decode_job(line.recv_bytes())
                    result, pid = _fork(job, compiler, seat.limits)
                    running[result] = (job, pid)
                elif isinstance(ready, Connection):
                    job, pid = running.pop(ready)
                    line.send_bytes(_receive(ready, job, pid, seat.limits))
    except (EOFError, OSError):  # the worker is gone
        for _, pid in running.values():
            os.kill(pid, signal.SIGKILL)


def _fork(job: Job, compiler: xgrammar.GrammarCompiler, limits: CompileLimits) -> tuple[Connection, int]:
    ours, theirs = Pipe(duplex=False)
    pid = os.fork()
    if pid:
        theirs.close()
        return ours, pid
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (limits.seconds, limits.seconds))
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + limits.num_bytes, size + limits.num_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        theirs.send_bytes(_encode_verdict(_compile(job, compiler)))
    finally:
        os._exit(0)  # nothing of the parent's is this process's to clean up


def _compile(job: Job, compiler: xgrammar.GrammarCompiler) -> Verdict:
    from baton.actors.engine.grammar import compile_grammar

    warnings = os.memfd_create("warnings")
    os.dup2(warnings, 2)
    try:
        compile_grammar(compiler, job.text)
    except Exception as error:  # of many types, all of them about the grammar
        if "bad_alloc" in str(error):
            raise MemoryError from error
        return Verdict(job.number, refusal=_reason(str(error)))
    told = os.pread(warnings, 4096, 0).decode(errors="replace")
    return Verdict(job.number, refusal=_reason(told) if told.strip() else "")


def _receive(result: Connection, job: Job, pid: int, limits: CompileLimits) -> bytes:
    """Take a child's verdict; one that dies without it has met its limits, or has broken the compiler."""
    try:
        verdict = result.recv_bytes()
    except EOFError:
        reason = f"it needs more than {limits.seconds} s or {limits.num_bytes >> 20} MiB to compile; simplify it"
        verdict = _encode_verdict(Verdict(job.number, refusal=reason))
    result.close()
    os.waitpid(pid, 0)
    return verdict


def _reason(told: str) -> str:
    """Leave out where in the compiler's source the message stands."""
    lines = [re.sub(r"^.*?\.(cc|h):\d+: (Warning: )?", "", line) for line in told.strip().splitlines()]
    return next((line for line in lines if line), "the compiler refused it")[:MAX_REASON_LEN]
