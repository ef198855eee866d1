"""Suffix decoding: what most often followed where texts ended like this one, its own and lately ended answers.

As long a draft as the occurrences agree on. Answers are shared among requests of one cache salt only, so that nobody
learns from the pace of tokens what another tenant was told. Source: Oliaro et al., "SuffixDecoding", 2024.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.actors.engine.drafters.token_index import TokenIndex
from baton.actors.engine.sequence import Sequence

CANDIDATES = 16  # occurrences that vote, of each text
LONGEST = 32  # tokens of a match that count
LEAST_SHARE = 0.5  # of the votes, below which a draft ends
CORPUS_TOKENS = 1 << 16  # of ended answers that are kept for a cache salt; then they begin anew
MAX_CORPORA = 64  # cache salts that have some; the one used longest ago goes
SEPARATOR = -1


class _Vote(NamedTuple):
    text: Tokens[int]
    at: int
    weight: int  # tokens that matched


@dataclass(slots=True)
class _Corpus:
    """Ended answers, one after the other."""

    width: int
    text: list[int] = field(default_factory=list[int])
    index: TokenIndex = field(init=False)

    def __post_init__(self) -> None:
        self.index = TokenIndex(self.text, self.width)

    def add(self, answer: Tokens[int]) -> None:
        self.text += (*answer, SEPARATOR)


class SuffixDrafter:
    def __init__(self, min_match: int) -> None:
        self._min_match = min_match
        self._indices: dict[Sequence, TokenIndex] = {}
        self._corpora: OrderedDict[str, _Corpus] = OrderedDict()  # by cache salt

    def propose(self, sequence: Sequence, num: int) -> Tokens[int]:
        text = sequence.tokens
        index = self._indices.get(sequence)
        if index is None:
            index = self._indices[sequence] = TokenIndex(text, self._min_match)
        votes: list[_Vote] = []
        if index.grow():
            votes += self._votes(index, text, text)
        corpus = self._corpora.get(sequence.request.cache_salt)
        if corpus is not None and corpus.index.grow():
            votes += self._votes(corpus.index, corpus.text, text)
        return _agreed(votes, num)

    def forget(self, sequence: Sequence) -> None:
        self._indices.pop(sequence, None)
        answer = sequence.tokens[sequence.request.prompt_len :]
        if len(answer) <= self._min_match:
            return
        salt = sequence.request.cache_salt
        corpus = self._corpora.get(salt)
        if corpus is None or len(corpus.text) + len(answer) >= CORPUS_TOKENS:
            corpus = self._corpora[salt] = _Corpus(self._min_match)
        corpus.add(answer[:CORPUS_TOKENS])
        self._corpora.move_to_end(salt)
        if len(self._corpora) > MAX_CORPORA:
            self._corpora.popitem(last=False)

    def _votes(self, index: TokenIndex, text: Tokens[int], tail: Tokens[int]) -> list[_Vote]:
        ends = list(index.ends(tail, CANDIDATES))
        return [_Vote(text, end, index.match_len(end, tail, LONGEST)) for end in ends]


def _agreed(votes: list[_Vote], num: int) -> list[int]:
    """Follow the longest matches, token by token, as long as most of them go the same way."""
    longest = max((vote.weight for vote in votes), default=0)
    votes = [vote for vote in votes if 2 * vote.weight > longest]
    drafts: list[int] = []
    while votes and len(drafts) < num:
        weights: Counter[int] = Counter()
        for vote in votes:
            weights[vote.text[vote.at]] += vote.weight
        token, weight = weights.most_common(1)[0]
        if token == SEPARATOR or weight < LEAST_SHARE * weights.total():
            break
        drafts.append(token)
        going = (vote for vote in votes if vote.text[vote.at] == token)
        votes = [_Vote(v.text, v.at + 1, v.weight) for v in going if v.at + 1 < len(v.text)]
    return drafts
