"""Drafters that know what will be said, and say so much of it rightly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.actors.engine.draft_length import CostLengths, FixedLengths
from baton.actors.engine.request import Request
from baton.actors.engine.sequence import Sequence as Life
from baton.actors.engine.speculation import DraftSpeculation
from tests.fakes import fake_output

Outputs = Callable[[Request], Sequence[int]]  # all that follows the request's tokens
NumRight = Callable[[int], int]  # by the number of tokens that a sequence has


def fake_outputs(request: Request) -> list[int]:
    return fake_output(request, request.sampling.max_tokens + 20)


@dataclass
class Scripted:
    """Proposes what `outputs` knows, wrong from the draft on that `num_right` names."""

    num_right: NumRight
    outputs: Outputs = fake_outputs
    num_vocab: int = 50
    known: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    num_forgotten: int = 0

    def propose(self, sequence: Life, num: int) -> list[int]:
        assert sequence.num_pending == 0
        request = sequence.request
        text = self.known.setdefault(request.id, [*request.tokens, *self.outputs(request)])
        num_known = len(sequence.tokens)
        assert text[:num_known] == sequence.tokens
        drafts = text[num_known : num_known + num]
        num_right = self.num_right(num_known)
        return [*drafts[:num_right], *((token + 1) % self.num_vocab for token in drafts[num_right:])]

    def forget(self, sequence: Life) -> None:
        self.known.pop(sequence.request.id, None)
        self.num_forgotten += 1


def all_right(_: int) -> int:
    return 99


def none_right(_: int) -> int:
    return 0


def some_right(num_tokens: int) -> int:
    return num_tokens * 7 % 5


def scripted(num_right: NumRight, k: int, *, by_cost: bool = False) -> DraftSpeculation:
    lengths = CostLengths(k, quiet_steps=2) if by_cost else FixedLengths()
    return DraftSpeculation(Scripted(num_right), lengths, k)
