"""An engine on a FakeRunner, with a record of what it said and a check against the runner's pure function."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from baton.actors.engine.batch import Batch
from baton.actors.engine.batch_wire import BatchDecoder, BatchEncoder
from baton.actors.engine.config import EngineConfig
from baton.actors.engine.engine import Engine
from baton.actors.engine.request import Request, SamplingParams
from baton.actors.engine.speculation import Speculation
from baton.actors.engine.updates import Update
from tests.fakes import FakeRunner, FakeStep, fake_output

EOS = frozenset({0, 1})


def make_request(id: str, prompt: int | tuple[int, ...], *, num_output: int = 0, **options: Any) -> Request:
    """A request with these tokens, or with so many of one fixed text: prompts of any lengths share prefixes."""
    tokens = tuple(2 + position * position % 41 for position in range(prompt)) if isinstance(prompt, int) else prompt
    salt, priority = options.pop("cache_salt", ""), options.pop("priority", 0)
    asked = options.pop("asked", None)
    sampling = SamplingParams(max_tokens=options.pop("max_tokens", 8), seed=options.pop("seed", 5), **options)
    return Request(
        id=id,
        tokens=tokens,
        sampling=sampling,
        num_output=num_output,
        cache_salt=salt,
        priority=priority,
        prompt=asked,
    )


def expected_tokens(request: Request, capacity: int) -> list[int]:
    """What the request must yield, told from its sampling parameters alone."""
    sampling = request.sampling
    num_max = min(request.prompt_len + sampling.max_tokens, capacity) - len(request.tokens)
    stops = EOS.difference(EOS if sampling.ignore_eos else ()).union(sampling.stop_token_ids)
    if request.num_output > sampling.min_tokens and request.tokens[-1] in stops:
        return []  # it came with its last token
    output = fake_output(request, num_max)
    for index, token in enumerate(output):
        if token in stops and request.num_output + index >= sampling.min_tokens:
            return output[: index + 1]
    return output


@dataclass
class WiredRunner:
    """Runs what is left of a batch after a trip to another rank."""

    runner: FakeRunner
    encoder: BatchEncoder = field(default_factory=BatchEncoder)
    decoder: BatchDecoder = field(default_factory=BatchDecoder)

    def launch(self, batch: Batch) -> FakeStep:
        return self.runner.launch(self.decoder.decode(self.encoder.encode(batch)))


@dataclass
class Rig:
    num_blocks: int = 64
    block_size: int = 4
    max_context: int = 100_000
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    is_wired: bool = False
    speculation: Speculation | None = None
    tokens: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    finished: dict[str, Update] = field(default_factory=dict[str, Update])
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.runner = FakeRunner(self.num_blocks, self.block_size)
        self.engine = Engine(
            EngineConfig(block_size=self.block_size, **self.config),
            WiredRunner(self.runner) if self.is_wired else self.runner,
            num_blocks=self.num_blocks,
            max_context=self.max_context,
            eos_token_ids=EOS,
            speculation=self.speculation,
        )
        self.requests: dict[str, Request] = {}

    @property
    def capacity(self) -> int:
        return min(self.max_context, self.num_blocks * self.block_size)

    def submit(self, request: Request, *, export: bool = False) -> None:
        self.expect(request)
        self.engine.submit(request, export=export)

    def expect(self, request: Request) -> None:
        """Record the request's updates from now on as those of a new life."""
        self.requests[request.id] = request
        self.tokens[request.id] = []
        self.finished.pop(request.id, None)

    def step(self) -> list[Update]:
        updates = self.engine.step()
        self.num_steps += 1
        assert self.num_steps < 5_000, "the engine never gets done"
        for update in updates:
            assert update.request_id not in self.finished, "an update after the last one"
            self.tokens[update.request_id].extend(update.tokens)
            if update.finish is not None:
                self.finished[update.request_id] = update
        return updates

    def run(self) -> list[Update]:
        """Step until there is no work."""
        updates: list[Update] = []
        while self.engine.has_work:
            updates += self.step()
        return updates

    def check_output(self, request_id: str) -> None:
        """The request ended, with exactly the tokens it must have."""
        request = self.requests[request_id]
        assert self.finished[request_id].finish in ("stop", "length")
        assert self.tokens[request_id] == expected_tokens(request, self.capacity)

    def check_idle(self) -> None:
        """Every request ended as it must, and no block is held."""
        for request_id in self.requests:
            self.check_output(request_id)
        counts = self.engine.counts()
        assert counts.held == 0
        assert counts.free + counts.cached == counts.total
        self.engine.check_integrity()

    def num_starts(self, request_id: str) -> int:
        """How often the request got a slot: one more than its preemptions."""
        return sum(a.request.id == request_id for batch in self.runner.launched for a in batch.admissions)
