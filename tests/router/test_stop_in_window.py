"""Entry S10: a stop string that completes inside a window of accepted drafts ends everything at the same token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from baton.actors.engine.request import Request, SamplingParams, TokenLogprobs
from baton.actors.messages import Output
from baton.router.generation import Choice

TEXT = b"one two\nEND three four"
NUM_COUNTED = TEXT.index(b"END") + 3


def told(window: int) -> tuple[str, list[int], list[float], str | None, int]:
    """What a client hears when tokens (a byte each) come `window` at a time."""
    tokenizer: Any = SimpleNamespace(token_bytes=[bytes([i]) for i in range(256)], special_ids=frozenset[int]())
    request = Request(id="a", tokens=(1,), sampling=SamplingParams(max_tokens=99, seed=0, logprobs=0))
    choice = Choice(0, request, ["END"], tokenizer)
    text, ids, logprobs = "", list[int](), list[float]()
    for start in range(0, len(TEXT), window):
        tokens = tuple(TEXT[start : start + window])
        scores = tuple(TokenLogprobs(-float(start + i + 1)) for i in range(len(tokens)))
        delta = choice.take(Output(request_id="a", tokens=tokens, logprobs=scores))
        if delta is not None:
            text += delta.text
            ids += [scored.id for scored in delta.scored]
            logprobs += [scored.logprobs.chosen for scored in delta.scored if scored.logprobs is not None]
        if choice.finish is not None:
            break
    return text, ids, logprobs, choice.finish, choice.num_tokens


@pytest.mark.parametrize("window", range(1, 9))
def test_text_ids_logprobs_and_usage_are_cut_at_the_same_token(window: int) -> None:
    text, ids, logprobs, finish, num_tokens = told(window)
    assert text == "one two\n" and finish == "stop" and num_tokens == NUM_COUNTED
    assert bytes(ids) == TEXT[:NUM_COUNTED]
    assert logprobs == [-float(i + 1) for i in range(NUM_COUNTED)]
