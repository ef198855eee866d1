"""Prompt lookup: what followed the last time that the text ended like this.

Good for answers that repeat their prompt: edits, extraction, code. Source: A. Saxena, "Prompt Lookup Decoding", 2023.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from baton.actors.engine.drafters.token_index import TokenIndex
from baton.actors.engine.sequence import Sequence

CANDIDATES = 8  # occurrences that are compared
LONGEST = 32  # a longer match says no more


class NgramDrafter:
    """Takes the occurrence with the longest match; among equals the latest."""

    def __init__(self, min_match: int) -> None:
        self._min_match = min_match
        self._indices: dict[Sequence, TokenIndex] = {}

    def propose(self, sequence: Sequence, num: int) -> Tokens[int]:
        text = sequence.tokens
        index = self._indices.get(sequence)
        if index is None:
            index = self._indices[sequence] = TokenIndex(text, self._min_match)
        if not index.grow():
            return ()
        best = max(
            index.ends(text, CANDIDATES),
            key=lambda end: (index.match_len(end, text, LONGEST), end),
            default=len(text),
        )
        return _cyclic(text, best, num)

    def forget(self, sequence: Sequence) -> None:
        self._indices.pop(sequence, None)


def _cyclic(text: list[int], start: int, num: int) -> list[int]:
    """`num` tokens from `start`; behind the text's end they go on from `start` again: a text that repeats itself."""
    found = text[start : start + num]
    while found and len(found) < num:
        found += found[: num - len(found)]
    return found
