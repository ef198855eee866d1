"""Finds where the last tokens of a text stood before, in a text that only grows.

Every position is entered once, under the few tokens that end there; positions with the same ones form a chain, latest
first. So a step costs as much as the tokens it adds and the few occurrences it looks at, whatever the text's length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

MOST_AT_ONCE = 8192  # tokens entered in one call: a long prompt is spread over some steps


class TokenIndex:
    def __init__(self, text: Sequence[int], width: int) -> None:
        """`text` is kept, not copied, and may only grow. `width`: how many tokens make an occurrence."""
        self._text = text
        self._width = width
        self._latest: dict[tuple[int, ...], int] = {}
        self._previous: list[int] = [-1] * width  # by end: the end of the occurrence before it

    def grow(self) -> bool:
        """Enter what the text has gained. False: there is more to enter than is done in one call."""
        text, width, latest, previous = self._text, self._width, self._latest, self._previous
        first = len(previous)
        last = min(len(text), first + MOST_AT_ONCE)
        for end in range(first, last + 1):
            key = tuple(text[end - width : end])
            previous.append(latest.get(key, -1))
            latest[key] = end
        return last == len(text)

    def ends(self, tail: Sequence[int], most: int) -> Iterator[int]:
        """Ends of earlier occurrences of the last `width` of `tail`, latest first; what follows one is text[end:]."""
        end = self._latest.get(tuple(tail[len(tail) - self._width :]), -1) if len(tail) >= self._width else -1
        while end >= 0 and most:
            if end < len(self._text):
                yield end
                most -= 1
            end = self._previous[end]

    def match_len(self, end: int, tail: Sequence[int], most: int) -> int:
        """How many tokens before `end` equal the last ones of `tail`, at most `most`."""
        text = self._text
        limit = min(most, end, len(tail))
        for num in range(self._width, limit):
            if text[end - num - 1] != tail[len(tail) - num - 1]:
                return num
        return limit
