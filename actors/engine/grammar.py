# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Grammars that constrain what is sampled: compiled ones by their text, and each slot's place in its own.

A grammar is an xgrammar structural tag, as JSON text. The state of a match is rebuilt from the output's tokens like
everything else. It lives on the host: the mask of a step needs the ids of the step before, which is waited for only
when a constrained row is to be sampled, and after the step's forward pass has been queued.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary

import torch

from baton.actors.engine.batch import Admission, Row
from baton.actors.engine.vocabulary import Vocabulary

if TYPE_CHECKING:
    import xgrammar  # where it is used it is imported: a second that only those pay who need it

MAX_GRAMMARS = 256  # compiled ones kept although nobody uses them now
CACHE_BYTES = 256 << 20  # of masks that grammars share
# In a printed grammar, where quotes and backslashes of strings are escaped: nothing of a schema can look like these.
JSON_PATTERN = re.compile(r", json_string=true\)$", re.MULTILINE)
COUNTED_CHARACTER = re.compile(r'^(\w+_characters\w* ::= \(\()\[\^\\"\\\\\\r\\n\]\)', re.MULTILINE)


class GrammarStore:
    """Compiled grammars of one model. Thread-safe; whoever holds a grammar finds it here without a compilation."""

    def __init__(self, load: Callable[[], Vocabulary], vocab_size: int) -> None:
        """`load` may be slow: it is called when the first grammar comes. `vocab_size` is the logits' width."""
        self.vocabulary = cache(load)
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._compiler: xgrammar.GrammarCompiler | None = None
        self._recent: OrderedDict[str, xgrammar.CompiledGrammar] = OrderedDict()
        self._live: WeakValueDictionary[str, xgrammar.CompiledGrammar] = WeakValueDictionary()

    def find(self, text: str) -> xgrammar.CompiledGrammar | None:
        with self._lock:
            if text in self._recent:
                self._recent.move_to_end(text)
            return self._live.get(text)

    def get(self, text: str) -> xgrammar.CompiledGrammar:
        """Find a grammar, or compile it: milliseconds for one that is known to compile."""
        found = self.find(text)
        if found is not None:
            return found
        with self._lock:
            if self._compiler is None:
                self._compiler = make_compiler(self.vocabulary(), self._vocab_size)
            grammar = self._live[text] = self._recent[text] = compile_grammar(self._compiler, text)
            if len(self._recent) > MAX_GRAMMARS:
                self._recent.popitem(last=False)
            return grammar


def make_compiler(vocabulary: Vocabulary, vocab_size: int) -> xgrammar.GrammarCompiler:
    """Its grammars find out which ids a state allows when a sequence first comes there, and remember it.

    Finding it out for all states beforehand takes seconds for large schemas (tests/bench/structured.py).
    """
    import xgrammar

    pieces = list(vocabulary.token_bytes[:vocab_size])
    info = xgrammar.TokenizerInfo(
        pieces, xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=list(vocabulary.eos_ids)
    )
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES, enable_dynamic_compilation=True)


def compile_grammar(compiler: xgrammar.GrammarCompiler, text: str) -> xgrammar.CompiledGrammar:
    """Compile a structural tag, whose patterns of strings are patterns of their JSON text.

    The library would read them as patterns of plain text and write that between quotes unescaped. And its strings of
    limited length may have control characters, which JSON does not allow.
    """
    import xgrammar

    grammar = xgrammar.Grammar.from_structural_tag(text)
    rules = str(grammar)
    mended = JSON_PATTERN.sub(", json_string=false)", rules)
    mended = COUNTED_CHARACTER.sub(lambda found: found[1] + r"[^\0-\x1f\"\\])", mended)
    return compiler.compile_grammar(grammar if mended == rules else xgrammar.Grammar.from_ebnf(mended))


class SampledIds(Protocol):
    """A step's ids on their way to the host, one for each row that samples."""

    def wait(self) -> list[torch.Tensor]: ...


class Match:
    """How far one sequence's output has come in its grammar. When it is over, only end-of-sequence may follow."""

    def __init__(self, grammar: xgrammar.CompiledGrammar, output: Sequence[int]) -> None:
        import xgrammar

        self.matcher = xgrammar.GrammarMatcher(grammar)
        self.is_over = False
        self._ahead: list[tuple[int, Match]] = []  # drafts, each with the match as it will be if all up to it are right
        for token in output:
            self.accept(token)

    def accept(self, token: int) -> None:
        self.is_over = self.is_over or not self.matcher.accept_token(token) or self.matcher.is_terminated()

    def ahead(self, drafts: Sequence[int]) -> Match:
        """Return the match behind these drafts, the last of which is new since the call before; itself behind none.

        Drafts get copies, and `follow` goes on with those that were right: a matcher may come to another state when it
        is rolled back and accepts again what it accepted before (one past its token budget does).
        """
        if not drafts:
            self._ahead.clear()
            return self
        before = self._ahead[-1][1] if self._ahead else self
        match = copy(before)
        match.matcher = before.matcher.fork()
        match._ahead = []
        match.accept(drafts[-1])
        self._ahead.append((drafts[-1], match))
        return match

    def follow(self, token: int) -> None:
        """Accept a sampled token, which may be the next of the drafts."""
        ahead, self._ahead = self._ahead, []
        if ahead and ahead[0][0] == token:
            self.matcher, self.is_over = ahead[0][1].matcher, ahead[0][1].is_over
            self._ahead = ahead[1:]
        else:
            self.accept(token)


@dataclass(frozen=True, slots=True)
class _Unread:
    ids: SampledIds
    matches: list[tuple[int, Match]]  # with the index of its id


class SlotGrammars:
    """The matches of the sequences in a runner's slots."""

    def __init__(self, store: GrammarStore | None, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._store = store
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._matches: dict[int, Match] = {}  # by slot
        self._unread: list[_Unread] = []

    def __contains__(self, slot: int) -> bool:
        return slot in self._matches

    def admit(self, admission: Admission) -> None:
        request = admission.request
        self._matches.pop(admission.slot, None)
        if request.grammar:
            assert self._store is not None, "this runner was made without grammars"
            output = admission.tokens[request.prompt_len :]
            self._matches[admission.slot] = Match(self._store.get(request.grammar), output)

    def mask(self, rows: Sequence[Row]) -> torch.Tensor | None:
        """Which ids each row may sample: [num_rows, ceil(vocab / 32)] int32, a bit for each; None = all of them.

        A row may end with drafts, if the row before it is its own without the last. Waits for the ids that
        constrained rows sampled in the step before.
        """
        matches = [(i, self._matches[row.slot]) for i, row in enumerate(rows) if row.slot in self._matches]
        if not matches:
            return None
        self._settle()
        mask = torch.full((len(rows), -(-self._vocab_size // 32)), -1, dtype=torch.int32)
        for index, match in matches:
            match = match.ahead(rows[index].drafts)
            if not match.is_over:
                match.matcher.fill_next_token_bitmask(mask, index)
                match.is_over = not bool(mask[index].any())  # the vocabulary cannot go on
            if match.is_over:
                self._allow_end_only(mask[index])
        return mask

    def note(self, rows: Sequence[Row], ids: SampledIds) -> None:
        """Remember where the ids will be that `rows` have sampled; one that counts for nothing is negative."""
        matches = [(i, self._matches[row.slot]) for i, row in enumerate(rows) if row.slot in self._matches]
        if matches:
            self._unread.append(_Unread(ids, matches))

    def _settle(self) -> None:
        for unread in self._unread:
            ids: list[int] = unread.ids.wait()[0].tolist()
            for index, match in unread.matches:
                if ids[index] >= 0:
                    match.follow(ids[index])
        self._unread.clear()

    def _allow_end_only(self, row: torch.Tensor) -> None:
        row.zero_()
        for id in self._eos_ids:
            bit = 1 << (id % 32)
            row[id // 32] |= bit - (1 << 32) if bit >> 31 else bit
