"""Jump-forward: what a request's grammar forces, as drafts.

A forced text has several spellings in tokens, and the model's own is kept: the target verifies these drafts as any
others, so that the output's tokens are those of one token a step.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from typing import TYPE_CHECKING

from baton.actors.engine.grammar import GrammarStore
from baton.actors.engine.sequence import Sequence

if TYPE_CHECKING:
    import xgrammar

# Where JSON may have white space a grammar forces nothing: how models put it, tried behind what was forced.
USUAL = (': "', ": ", ', "')
ROUNDS = 4  # forced texts that are joined
LONGEST = 32  # bytes of a token that drafts are spelled with


class GrammarDrafter:
    def __init__(self, store: GrammarStore) -> None:
        self._store = store
        self._ids: dict[bytes, int] = {}
        self._places: dict[Sequence, _Place] = {}

    def propose(self, sequence: Sequence, num: int) -> Tokens[int]:
        if not sequence.request.grammar:
            return ()
        place = self._places.get(sequence)
        if place is None:
            grammar = self._store.get(sequence.request.grammar)
            place = self._places[sequence] = _Place(grammar, sequence.request.prompt_len)
        place.advance(sequence.tokens)
        return self._spelled(place.forced().encode(), num)

    def _spelled(self, text: bytes, num: int) -> list[int]:
        """Spell text with the longest tokens that fit, at most `num`."""
        if text and not self._ids:
            self._ids = {piece: id for id, piece in enumerate(self._store.vocabulary().token_bytes) if piece}
        tokens: list[int] = []
        while text and len(tokens) < num:
            size = next((size for size in range(min(LONGEST, len(text)), 0, -1) if text[:size] in self._ids), 0)
            if not size:
                break
            tokens.append(self._ids[text[:size]])
            text = text[size:]
        return tokens

    def forget(self, sequence: Sequence) -> None:
        self._places.pop(sequence, None)


class _Place:
    """How far a sequence has come in its grammar."""

    def __init__(self, grammar: xgrammar.CompiledGrammar, prompt_len: int) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(grammar)
        self.num_tokens = prompt_len
        self._is_over = False

    def advance(self, tokens: Tokens[int]) -> None:
        for token in tokens[self.num_tokens :]:
            self._is_over = self._is_over or not self._matcher.accept_token(token) or self._matcher.is_terminated()
        self.num_tokens = len(tokens)

    def forced(self) -> str:
        """What must follow, and what usually stands between that and what must follow then."""
        text = "" if self._is_over else self._matcher.find_jump_forward_string()
        if not text:
            return ""
        ahead = self._matcher.fork()
        forced = text
        for _ in range(ROUNDS):
            if not forced or not ahead.accept_string(forced):
                break
            usual = next((one for one in USUAL if ahead.accept_string(one)), "")
            forced = ahead.find_jump_forward_string()
            text += usual + forced
        return text
