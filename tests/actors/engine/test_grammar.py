"""Masks and matches over a vocabulary of single bytes: no model, no process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from baton.actors.engine.batch import Admission, Row
from baton.actors.engine.grammar import GrammarStore, Match, SlotGrammars
from baton.actors.engine.request import Request, SamplingParams
from baton.actors.engine.vocabulary import Vocabulary

EOS, VOCAB = 256, 300  # the logits are wider than the vocabulary
STORE = GrammarStore(lambda: Vocabulary((*(bytes([i]) for i in range(256)), b""), (EOS,)), VOCAB)


def tag(**format: Any) -> str:
    return json.dumps({"type": "structural_tag", "format": format})


TIME = tag(type="regex", pattern="[0-2][0-9]:[0-5]0")


@dataclass
class Sampled:
    ids: list[int]
    num_waits: int = 0

    def wait(self) -> list[torch.Tensor]:
        self.num_waits += 1
        return [torch.tensor(self.ids)]


def row(slot: int) -> Row:
    return Row(slot, 3, 1, (0,), [0], True)


def admission(slot: int, grammar: str, output: bytes = b"") -> Admission:
    tokens = (1, 2, 3, *output)
    sampling = SamplingParams(max_tokens=9, seed=0)
    request = Request(id="r", tokens=(1, 2, 3), sampling=sampling, grammar=grammar)
    return Admission(slot, request, tokens)


def allowed(mask: torch.Tensor, index: int = 0) -> set[int]:
    return {id for id in range(VOCAB) if int(mask[index, id // 32]) >> (id % 32) & 1}


def digits(text: str) -> set[int]:
    return set(text.encode())


@pytest.fixture
def slots() -> SlotGrammars:
    return SlotGrammars(STORE, VOCAB, [EOS])


def test_each_token_opens_the_next_ones(slots: SlotGrammars) -> None:
    slots.admit(admission(0, TIME))
    for token, expected in zip(b"12:30", ("012", "0123456789", ":", "012345", "0"), strict=True):
        mask = slots.mask([row(0)])
        assert mask is not None and allowed(mask) == digits(expected)
        slots.note([row(0)], Sampled([token]))
    mask = slots.mask([row(0)])
    assert mask is not None and allowed(mask) == {EOS}
    slots.note([row(0)], Sampled([EOS]))
    mask = slots.mask([row(0)])  # the one step too many
    assert mask is not None and allowed(mask) == {EOS}


def test_unconstrained_rows_are_free_and_wait_for_nothing(slots: SlotGrammars) -> None:
    slots.admit(admission(0, TIME))
    slots.admit(admission(1, ""))
    pending = Sampled([ord("1"), 7])
    slots.note([row(0), row(1)], pending)
    assert slots.mask([row(1)]) is None and pending.num_waits == 0
    mask = slots.mask([row(1), row(0)])
    assert mask is not None and pending.num_waits == 1
    assert len(allowed(mask, 0)) == VOCAB and allowed(mask, 1) == digits("0123456789")
    slots.admit(admission(0, ""))  # the slot's next owner
    assert slots.mask([row(0)]) is None


def test_a_match_goes_on_from_the_output_so_far(slots: SlotGrammars) -> None:
    slots.admit(admission(0, TIME, output=b"12:"))
    mask = slots.mask([row(0)])
    assert mask is not None and allowed(mask) == digits("012345")


def test_a_vocabulary_that_cannot_go_on_ends_the_output() -> None:
    store = GrammarStore(lambda: Vocabulary((b"a", b"b", b""), (2,)), 40)
    slots = SlotGrammars(store, 40, [2])
    slots.admit(admission(0, tag(type="regex", pattern="[ab]c")))
    slots.note([row(0)], Sampled([0]))
    mask = slots.mask([row(0)])
    assert mask is not None and {id for id in range(40) if int(mask[0, id // 32]) >> (id % 32) & 1} == {2}


@pytest.mark.parametrize("num_accepted", range(9))
def test_a_window_of_drafts_has_a_mask_each_and_leaves_the_state_of_the_accepted_ones(num_accepted: int) -> None:
    slots = SlotGrammars(STORE, VOCAB, [EOS])
    slots.admit(admission(0, TIME))
    drafts = [*b"12:30", EOS, EOS, ord("x")]  # a window that runs past the end
    window = [Row(0, 3, 1 + num, (0, *drafts[:num]), [0], True, num) for num in range(len(drafts) + 1)]
    masks = slots.mask(window)
    slots.note(window, Sampled([*drafts[:num_accepted], ord("1"), *[-1] * (len(drafts) - num_accepted)]))
    after = slots.mask([row(0)])
    alone = SlotGrammars(STORE, VOCAB, [EOS])
    alone.admit(admission(0, TIME))
    for index, token in enumerate([*drafts[:num_accepted], ord("1")]):
        mask = alone.mask([row(0)])
        assert masks is not None and mask is not None and torch.equal(masks[index], mask[0])
        alone.note([row(0)], Sampled([token]))
    expected = alone.mask([row(0)])
    assert after is not None and expected is not None and torch.equal(after, expected)


def test_a_held_grammar_is_not_compiled_again() -> None:
    store = GrammarStore(lambda: Vocabulary((b"a", b""), (1,)), 2)
    grammar = store.get(tag(type="regex", pattern="a+"))
    for i in range(1, 300):
        store.get(tag(type="regex", pattern=f"a{{{i}}}"))
    assert store.find(tag(type="regex", pattern="a+")) is grammar
    assert store.find(tag(type="regex", pattern="a{1}")) is None  # long unused, and nobody holds it


def test_thinking_is_bounded_by_its_budget() -> None:
    """The grammar that the gateway makes of a thinking budget: so many tokens, then the end of thinking."""
    close = "</think>"
    text = tag(type="sequence", elements=[
        {"type": "any_text", "excludes": [close], "max_tokens": 3},
        {"type": "const_string", "value": close},
        {"type": "regex", "pattern": "[0-9]"},
    ])  # fmt: skip
    early = Match(STORE.get(text), [*b"a</think>"])
    late = Match(STORE.get(text), [*b"abc"])
    mask = torch.zeros(2, -(-VOCAB // 32), dtype=torch.int32)
    early.matcher.fill_next_token_bitmask(mask, 0)
    late.matcher.fill_next_token_bitmask(mask, 1)
    assert allowed(mask, 0) == digits("0123456789") and allowed(mask, 1) == {ord("<")}
