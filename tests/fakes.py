"""Fakes that several test folders share.

`FakeRunner` is a device whose next token is a pure function of all tokens so far, computed from the KV that really
lies in the blocks of the row's table: a wrong block, position, slot or history changes the text.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from baton.actors.engine.batch import Batch, Row, StepOutput
from baton.actors.engine.prompt_record import PromptPart
from baton.actors.engine.request import Request, TokenLogprobs

_MASK = (1 << 64) - 1


def _kv_state(previous: int, token: int) -> int:
    """What a position's KV holds: a digest of all tokens up to it."""
    return (previous * 6364136223846793005 + 2 * token + 1442695040888963407) & _MASK


def _sample(states: Iterable[int], seed: int, vocab_size: int) -> int:
    digest = seed
    for state in states:
        digest = (digest * 31 + state) & _MASK
    digest = ((digest ^ (digest >> 33)) * 0xFF51AFD7ED558CCD) & _MASK
    return (digest ^ (digest >> 33)) % vocab_size


def fake_output(request: Request, num: int, vocab_size: int = 50) -> list[int]:
    """The first `num` tokens that follow `request.tokens` on a FakeRunner, whatever would end the request."""
    states: list[int] = []
    output: list[int] = []
    new: Sequence[int] = request.tokens
    for _ in range(num):
        for token in new:
            states.append(_kv_state(states[-1] if states else 0, token))
        output.append(_sample(states, request.sampling.seed, vocab_size))
        new = output[-1:]
    return output


def fake_kv(tokens: Sequence[int], block_size: int) -> list[list[int]]:
    """What the blocks of these tokens hold once computed; the last may be partly filled."""
    states: list[int] = []
    for token in tokens:
        states.append(_kv_state(states[-1] if states else 0, token))
    return [states[start : start + block_size] for start in range(0, len(states), block_size)]


@dataclass(slots=True)
class _Slot:
    request: Request
    history: list[int]


@dataclass(slots=True)
class FakeStep:
    """Runs on the device only when it, or a later step, is waited for: as late as a real one might."""

    runner: FakeRunner
    batch: Batch
    output: StepOutput | None = None

    def wait(self) -> StepOutput:
        while self.output is None:
            self.runner.run_next()
        return self.output


@dataclass
class FakeRunner:
    num_blocks: int
    block_size: int
    vocab_size: int = 50
    step_s: float = 0.0  # that the device takes for a step
    launched: list[Batch] = field(default_factory=list[Batch])
    kv: list[list[int]] = field(init=False)  # [num_blocks][block_size]

    def __post_init__(self) -> None:
        self.kv = [[-1 - block] * self.block_size for block in range(self.num_blocks)]
        self._queue: deque[FakeStep] = deque()
        self._slots: dict[int, _Slot] = {}

    def launch(self, batch: Batch) -> FakeStep:
        step = FakeStep(self, batch)
        self._queue.append(step)
        self.launched.append(batch)
        return step

    def write_block(self, block: int, content: Sequence[int]) -> None:
        """A peer's write: lands at once, unordered with the steps in flight."""
        self.kv[block][: len(content)] = content

    def run_next(self) -> None:
        time.sleep(self.step_s)
        step = self._queue.popleft()
        for admission in step.batch.admissions:
            self._slots[admission.slot] = _Slot(admission.request, list(admission.tokens))
        tokens: list[tuple[int, ...]] = []
        logprobs: list[tuple[TokenLogprobs, ...] | None] = []
        prompts: dict[int, PromptPart] = {}
        for index, row in enumerate(step.batch.rows):
            sampled = self._run_row(row)
            wants = self._slots[row.slot].request.sampling.logprobs is not None
            tokens.append(sampled)
            if (request := self._slots[row.slot].request).prompt is not None and row.start < request.prompt_len:
                prompts[index] = _prompt_part(request, row)
            logprobs.append(tuple(TokenLogprobs(-float(token)) for token in sampled) if wants else None)
        step.output = StepOutput(tuple(tokens), tuple(logprobs), prompts)

    def _run_row(self, row: Row) -> tuple[int, ...]:
        slot = self._slots[row.slot]
        tokens = list(row.tokens)
        if len(tokens) < row.num_tokens:
            tokens.append(slot.history[-1])  # sampled by an earlier step, known to the device alone
        assert len(tokens) == row.num_tokens
        num_known = row.num_tokens - row.num_drafts
        assert slot.history[row.start : row.start + num_known] == tokens[:num_known], "tokens are not the slot's"
        for position, token in enumerate(tokens, row.start):
            previous = self._read(row, position - 1) if position else 0
            self.kv[row.blocks[position // self.block_size]][position % self.block_size] = _kv_state(previous, token)
        if not row.sample:
            return ()
        end = row.end - row.num_drafts
        assert end == len(slot.history), "a token is sampled although later ones are known"
        sampled: list[int] = []
        for draft in (*tokens[num_known:], None):
            states = (self._read(row, position) for position in range(end + len(sampled)))
            sampled.append(_sample(states, slot.request.sampling.seed, self.vocab_size))
            if sampled[-1] != draft:
                break
        slot.history += sampled
        return tuple(sampled)

    def _read(self, row: Row, position: int) -> int:
        return self.kv[row.blocks[position // self.block_size]][position % self.block_size]


def _prompt_part(request: Request, row: Row) -> PromptPart:
    """A token's log-probability is -token; its hidden state is (token, 1)."""
    scored = request.tokens[row.start + 1 : row.end + 1]
    state = np.array([sum(row.tokens), len(row.tokens)], dtype="<f4")
    return PromptPart(
        start=row.start, logprobs=tuple(TokenLogprobs(-float(token)) for token in scored), pooled=state.tobytes()
    )
