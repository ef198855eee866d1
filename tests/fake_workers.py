"""A worker for gateway tests: the real gRPC protocol in this process, with scripted tokens in place of a model.

A script maps a request to its whole output, as steps of tokens, so that a migrated request goes on where it stood.
One frame a step carries the outputs of all running requests, as real workers do.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import numpy as np

from baton.actors.engine.block_hash import block_hashes, root_hash
from baton.actors.engine.request import FinishReason, PromptOutput, Request, TokenLogprobs
from baton.actors.messages import (
    Cancel,
    Frame,
    KVEvents,
    Load,
    Output,
    PeerAddress,
    PhaseTimes,
    Role,
    ServedBy,
    Submit,
    ToWorker,
    WorkerInfo,
)
from baton.actors.rpc import SERVE, decode_to_worker, make_server

Script = Callable[[Request], Sequence[Sequence[int]]]  # steps of tokens; the fake adds EOS when they end


def counting(request: Request) -> Sequence[Sequence[int]]:
    """A script of endless tokens that depend on position only: 1000, 1001, ..."""
    return [(1000 + i,) for i in range(request.sampling.max_tokens)]


def saying(*steps: Sequence[int]) -> Script:
    return lambda request: steps


@dataclass
class FakeRunning:
    submit: Submit
    steps: list[list[int]]  # still to be given
    num_output: int
    is_first: bool = True
    cached: int = 0
    ready_at: float = 0.0  # on time.monotonic: before it, no token


@dataclass
class FakeStream:
    number: int = 0
    running: dict[str, FakeRunning] = field(default_factory=dict[str, FakeRunning])
    events: list[KVEvents] = field(default_factory=list[KVEvents])
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    told: int = 0  # running requests, in its last frame


class FakeWorker:
    def __init__(
        self,
        script: Script = counting,
        *,
        worker_id: str = "w0",
        role: Role = "both",
        eos: int = 2,
        step_s: float = 0.0,
        max_context: int = 8192,
    ) -> None:
        self.script = script
        self.worker_id = worker_id
        self.role: Role = role
        self.eos = eos
        self.step_s = step_s
        self.max_context = max_context
        self.incarnation = uuid.uuid4().hex
        self.block_size = 16
        self.max_sequences = 1 << 16
        self.step_tokens = 1 << 16  # so many that the gateway never holds a request back, unless a test says so
        self.submits: list[Submit] = []
        self.cancels: list[str] = []
        self.num_resyncs = 0
        self.load: Load | None = None  # reported in place of the true one
        self.error: str | None = None  # when set, the next outputs are errors
        self.is_refusal = False  # and the client's fault
        self.drops_requests = False  # when set, running requests are cancelled by the worker itself
        self.skips_frame = False  # when set, one frame is lost
        self.num_steps_allowed: int | None = None  # None = run freely
        self.tells_everybody = False  # a change of load goes to every stream at once, as real workers' does
        self.cached: set[bytes] = set()
        self._streams: list[FakeStream] = []
        self._server: grpc.aio.Server | None = None
        self._port = 0

    async def start(self, port: int = 0) -> WorkerInfo:
        self._server = make_server({SERVE: (self._serve, decode_to_worker)})
        self._port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        return self.info()

    async def kill(self) -> None:
        """Drop every connection at once, as a dying process does."""
        if self._server is not None:
            await self._server.stop(grace=None)
            self._server = None

    def info(self) -> WorkerInfo:
        return WorkerInfo(
            peer=PeerAddress(self.worker_id, f"127.0.0.1:{self._port}", self.incarnation),
            role=self.role,
            model="fake",
            block_size=self.block_size,
            num_blocks=1 << 16,
            max_context=self.max_context,
            step_tokens=self.step_tokens,
            max_sequences=self.max_sequences,
            mover="none",
            metrics_address="",
            pid=0,
        )

    @property
    def num_running(self) -> int:
        return sum(len(stream.running) for stream in self._streams)

    def allow(self, num_steps: int) -> None:
        """Let a worker that is held (`num_steps_allowed`) take some steps."""
        self.num_steps_allowed = (self.num_steps_allowed or 0) + num_steps
        self.wake()

    def wake(self) -> None:
        """Look again at flags that a test has changed."""
        for stream in self._streams:
            stream.wake.set()

    async def _serve(self, messages: AsyncIterator[ToWorker], context: Any) -> AsyncIterator[Frame]:
        stream = FakeStream()
        stream.events.append(self._snapshot())
        self._streams.append(stream)
        reader = asyncio.create_task(self._read(messages, stream))
        try:
            yield self._frame(stream, [])
            while True:
                await self._wait_for_work(stream)
                if self.skips_frame:
                    self.skips_frame = False
                    stream.number += 1
                    self._step(stream)
                yield self._frame(stream, self._step(stream))
                await asyncio.sleep(self.step_s)
        finally:
            reader.cancel()
            self._streams.remove(stream)

    async def _wait_for_work(self, stream: FakeStream) -> None:
        while not (stream.events or self._has_news(stream) or (_ready(stream) and self.num_steps_allowed != 0)):
            stream.wake.clear()
            await stream.wake.wait()

    def _has_news(self, stream: FakeStream) -> bool:
        return self.tells_everybody and stream.told != self.num_running

    async def _read(self, messages: AsyncIterator[ToWorker], stream: FakeStream) -> None:
        async for message in messages:
            if isinstance(message, Submit):
                self.submits.append(message)
                stream.running[message.request.id] = self._admitted(message)
            elif isinstance(message, Cancel):
                self.cancels.append(message.request_id)
                stream.running.pop(message.request_id, None)
            else:
                self.num_resyncs += 1
                stream.events.append(self._snapshot())
            self.wake()

    def _admitted(self, submit: Submit) -> FakeRunning:
        request = submit.request
        tokens = [token for step in self.script(request) for token in step]
        if request.num_output:  # migrated: its own steps do not matter any more
            steps = [[token] for token in tokens[request.num_output :]]
        else:
            steps = [list(step) for step in self.script(request)]
        hits = [block in self.cached for block in self._blocks(request)]
        cached = (hits.index(False) if False in hits else len(hits)) * self.block_size
        return FakeRunning(submit, [*steps, [self.eos]], request.num_output, cached=cached)

    def _step(self, stream: FakeStream) -> list[Output]:
        if self.num_steps_allowed:
            self.num_steps_allowed -= 1
        elif self.num_steps_allowed == 0:
            return []
        outputs = [self._advance(running) for running in _ready(stream)]
        for output in outputs:
            if output.finish is not None:
                self._remember(stream.running.pop(output.request_id).submit.request, stream)
        return outputs

    def _advance(self, running: FakeRunning) -> Output:
        request = running.submit.request
        if self.error is not None or self.drops_requests:
            finish: FinishReason = "cancelled" if self.drops_requests else "error"
            return Output(request_id=request.id, finish=finish, error=self.error, is_refusal=self.is_refusal)
        given: list[int] = []
        finish_now: FinishReason | None = None
        stops = set(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            stops.add(self.eos)
        for token in running.steps.pop(0):
            given.append(token)
            running.num_output += 1
            if token in stops and running.num_output >= request.sampling.min_tokens:
                finish_now = "stop"
            elif running.num_output >= request.sampling.max_tokens:
                finish_now = "length"
            if finish_now is not None:
                break
        cached, prompt = (running.cached, _prompt_output(request)) if running.is_first else (None, None)
        running.is_first = False
        return Output(
            request_id=request.id,
            tokens=tuple(given),
            logprobs=_logprobs(given, request.sampling.logprobs),
            cached_tokens=cached,
            prompt=prompt,
            finish=finish_now,
            served=self._served(running.submit) if finish_now else None,
        )

    def _served(self, submit: Submit) -> ServedBy:
        times = PhaseTimes(queue_s=0.001, prefill_s=0.002, handover_s=0.003, first_step_s=0.004)
        prefill = submit.prefill.worker_id if submit.prefill else self.worker_id
        return ServedBy(decode_worker=self.worker_id, prefill_worker=prefill, times=times)

    def _remember(self, request: Request, stream: FakeStream) -> None:
        """Keep the prompt's and output's blocks, as a prefix cache does, and tell."""
        output = [token for step in self.script(request) for token in step]
        tokens = (*request.tokens[: request.prompt_len], *output[: request.sampling.max_tokens])
        new = [
            b for b in block_hashes(tokens, self.block_size, root_hash(request.cache_salt, "")) if b not in self.cached
        ]
        self.cached.update(new)
        stream.events.append(KVEvents(stored=tuple(new)))

    def _blocks(self, request: Request) -> Sequence[bytes]:
        return block_hashes(request.tokens, self.block_size, root_hash(request.cache_salt, ""))

    def _snapshot(self) -> KVEvents:
        return KVEvents(stored=tuple(self.cached), snapshot=True)

    def _frame(self, stream: FakeStream, outputs: list[Output]) -> Frame:
        number, stream.number = stream.number, stream.number + 1
        events = stream.events.pop(0) if stream.events else KVEvents()
        stream.told = self.num_running
        if self.tells_everybody:
            self.wake()
        return Frame(
            number=number,
            incarnation=self.incarnation,
            outputs=tuple(outputs),
            load=self.load or Load(num_running=self.num_running),
            events=events,
        )


def _ready(stream: FakeStream) -> list[FakeRunning]:
    now = time.monotonic()
    return [running for running in stream.running.values() if running.ready_at <= now]


def _prompt_output(request: Request) -> PromptOutput | None:
    """What was asked about the prompt, as foreseeable as `_logprobs`; the pooled state is its first three tokens."""
    if request.prompt is None:
        return None
    pooled = np.array(request.tokens[:3], dtype="<f4").tobytes() if request.prompt.pooling else b""
    return PromptOutput(logprobs=_logprobs(request.tokens[1:], request.prompt.logprobs) or (), pooled=pooled)


def _logprobs(tokens: Sequence[int], num_top: int | None) -> tuple[TokenLogprobs, ...] | None:
    """Log-probabilities that a test can foresee: -token / 1000, alternatives one token and 1.0 further each."""
    if num_top is None:
        return None
    return tuple(
        TokenLogprobs(
            -token / 1000,
            tuple(token + i for i in range(num_top)),
            tuple(-token / 1000 - i for i in range(num_top)),
        )
        for token in tokens
    )
