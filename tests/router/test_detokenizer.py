from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.router.detokenizer import Detokenizer, StopMatcher
from baton.router.tokenizer import Tokenizer

BYTES = tuple(bytes([i]) for i in range(256))  # a tokenizer of single bytes: token i is byte i


def split(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def stream(parts: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    sent = ""
    for part in parts:
        match = matcher.push(part)
        sent += match.text
        if match.stop_string is not None:
            return sent, True
    return sent + matcher.flush(), False


@given(st.lists(st.integers(0, 49151), max_size=60), st.lists(st.integers(1, 5), min_size=60, max_size=60))
@settings(deadline=None, max_examples=200)
def test_streamed_text_is_the_full_decode_whatever_the_steps(
    tokenizer: Tokenizer, ids: list[int], sizes: list[int]
) -> None:
    detokenizer = Detokenizer(tokenizer.token_bytes, tokenizer.special_ids)
    text, rest = "", ids
    for size in sizes:
        step, rest = rest[:size], rest[size:]
        text += detokenizer.push(step).text
    text += detokenizer.push([], last=True).text
    reference = tokenizer._backend.decode(ids, skip_special_tokens=True)  # pyright: ignore[reportPrivateUsage]
    assert text == reference == tokenizer.decode(ids)


@pytest.mark.parametrize("text", ["ď 👋🏽 👨‍👩‍👧 漢", "e\u0301", "\u200d"])
def test_no_half_character_is_ever_sent(text: str) -> None:
    detokenizer = Detokenizer(BYTES, frozenset())
    parts = [detokenizer.push([byte]).text for byte in text.encode()]
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


def test_a_cut_character_is_flushed_once_at_the_end() -> None:
    detokenizer = Detokenizer(BYTES, frozenset())
    tokens = list("a👋".encode())[:3]
    assert detokenizer.push(tokens).text == "a"
    assert detokenizer.push([], last=True).text == "\ufffd"


def test_a_real_replacement_character_does_not_hold_back_what_follows() -> None:
    detokenizer = Detokenizer(BYTES, frozenset())
    sent = [detokenizer.push([byte]).text for byte in [0xFF] * 50]
    assert "".join(sent) == "\ufffd" * 50


def test_control_tokens_and_a_hidden_stop_token_give_no_text() -> None:
    detokenizer = Detokenizer(BYTES, frozenset({7}))
    assert detokenizer.push([65, 7, 66, 67], hidden_tail=1, last=True).text == "AB"
    assert detokenizer.num_tokens == 4


@given(
    st.text("AB", max_size=30),
    st.lists(st.text("AB", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(0)),
)
def test_stopping_does_not_depend_on_the_cuts(text: str, stops: list[str], cuts: list[int]) -> None:
    assert stream(split(text, cuts), stops) == stream([text], stops) == naive_stop(text, stops)


def naive_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


@given(st.text("AB", max_size=30), st.lists(st.text("AB", min_size=1, max_size=6), min_size=1, max_size=3))
def test_what_is_held_back_is_exactly_what_may_begin_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    sent = ""
    for end, char in enumerate(text, start=1):
        match = matcher.push(char)
        sent += match.text
        if match.stop_string is not None:
            return
        beginnings = [k for stop in stops for k in range(len(stop)) if text[:end].endswith(stop[:k])]
        assert len(sent) == end - max(beginnings)


def test_nothing_of_a_stop_string_over_tokens_is_sent() -> None:
    matcher = StopMatcher(["DEFGHIJ"])
    assert [matcher.push(part).text for part in ("ABC", "DEF", "G", "HI")] == ["ABC", "", "", ""]
    assert matcher.push("JK") == ("", "DEFGHIJ")


def test_a_near_miss_is_released_at_once() -> None:
    matcher = StopMatcher(["DEFGHIJ"])
    matcher.push("DEFGHI")
    assert matcher.push("X") == ("DEFGHIX", None)


def test_of_two_overlapping_stops_the_one_that_completes_first_wins() -> None:
    assert stream(["ABC", "DEF", "G", "HI", "J"], ["GHI", "DEFGHIJ"]) == ("ABCDEF", True)
    assert stream(["ABCDEFGHIJ"], ["GHI", "DEFGHIJ"]) == ("ABCDEF", True)


def test_a_stop_string_counts_the_tokens_up_to_its_own() -> None:
    detokenizer = Detokenizer(BYTES, frozenset(), stops=["ST"])
    released = detokenizer.push(list(b"aSTOP"))
    assert released == ("a", 3, "ST")
    assert detokenizer.num_tokens == 3


def test_before_min_tokens_a_stop_string_is_plain_text() -> None:
    detokenizer = Detokenizer(BYTES, frozenset(), stops=["\n"], min_tokens=4)
    assert detokenizer.push(list(b"a\nb")) == ("a\nb", 3, None)
    assert detokenizer.push(list(b"\nc")) == ("", 1, "\n")


def test_a_held_tail_is_not_lost_at_the_end() -> None:
    detokenizer = Detokenizer(BYTES, frozenset(), stops=["END"])
    assert detokenizer.push(list(b"the E")).text == "the "
    assert detokenizer.push(list(b"N"), last=True).text == "EN"
