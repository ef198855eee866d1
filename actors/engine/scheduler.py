"""Decides each step's rows: decodes first, one token each, then prefill chunks out of what the token budget leaves.

Among prompts, the eldest one that runs always gets a chunk; the rest of the budget goes to the shortest first, be it
running or waiting, so a newcomer starts while a long prompt prefills and the long prompt ends under any stream of
short ones. When blocks run out the youngest sequence is preempted; its tokens stay, its KV is recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from operator import attrgetter

from baton.actors.engine.batch import Admission, Batch, Row
from baton.actors.engine.block_space import BlockSpace
from baton.actors.engine.config import EngineConfig
from baton.actors.engine.prefix_cache import Match
from baton.actors.engine.room import Room
from baton.actors.engine.sequence import Sequence, Status
from baton.actors.engine.speculation import Drafts, Speculation
from baton.actors.engine.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class Plan:
    """One step's batch. `sequences` run parallel to its rows; `started` are those that ran for the first time."""

    batch: Batch
    sequences: list[Sequence]
    started: list[Sequence]


class Scheduler:
    def __init__(
        self, space: BlockSpace, room: Room, waiting: WaitingQueue, config: EngineConfig, speculation: Speculation
    ) -> None:
        self._space = space
        self._speculation = speculation
        self._room = room
        self._waiting = waiting
        self._config = config
        self._prefilling: list[Sequence] = []
        self._decoding: list[Sequence] = []
        self._started: list[Sequence] = []

    @property
    def num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def decoding(self) -> list[Sequence]:
        """The sequences that decode, as long as no prompt runs or waits; else none."""
        return [] if self._prefilling or self._waiting else self._decoding

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        return self._waiting.num_tokens + sum(seq.num_left for seq in self._prefilling)

    @property
    def waiting_context(self) -> float:
        """Sum over these tokens of the positions that each attends to."""
        running = (seq.num_left * (seq.num_scheduled + 0.5 * seq.num_left) for seq in self._prefilling)
        return self._waiting.context + sum(running)

    def add(self, sequence: Sequence) -> None:
        self._waiting.push(sequence, self._num_uncached(sequence))

    def join(self, sequence: Sequence) -> None:
        """Run a sequence that has entered already and lacks only the KV of its last token."""
        sequence.status = Status.DECODING
        self._decoding.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a waiting or running sequence out, with its slot; its blocks stay the caller's concern."""
        if sequence.status is Status.WAITING:
            self._waiting.remove(sequence)
            self._room.withdraw(sequence)
            return
        (self._prefilling if sequence.status is Status.PREFILLING else self._decoding).remove(sequence)
        self._room.leave(sequence)

    def schedule(self, step: int) -> Plan | None:
        """Decide step number `step`, which the caller must launch; None when nothing can run."""
        decodes = self._pick_decodes()
        budget = self._config.max_step_tokens - len(decodes)
        drafts = self._fitted(self._speculation.draft(decodes, budget // 2))
        if drafts:
            decodes = [seq for seq in decodes if seq not in drafts]
            budget -= sum(map(len, drafts.values()))
        chunks = self._pick_chunks(budget)
        sequences = [*decodes, *drafts, *chunks]
        if not sequences:
            return None
        admissions = tuple(
            Admission(seq.slot, seq.request, tuple(seq.tokens)) for seq in sequences if not seq.is_slot_ready
        )
        rows = [_decode_row(seq, step) for seq in decodes]
        rows += [_draft_row(seq, tokens, step) for seq, tokens in drafts.items()]
        rows += [self._chunk_row(seq, num_tokens, step) for seq, num_tokens in chunks.items()]
        started, self._started = self._started, []
        return Plan(Batch(tuple(rows), admissions, self._speculation.draft_next), sequences, started)

    def _pick_decodes(self) -> list[Sequence]:
        """Pick every decoding sequence whose last token is not in flight already, and give it a block if need be."""
        ready = [seq for seq in self._decoding if len(seq.tokens) + seq.num_pending < seq.stops.max_len]
        block_size = self._space.block_size
        short = [seq for seq in ready if seq.num_scheduled == len(seq.table.ids) * block_size]
        if not short:
            return ready
        num_available = self._space.pool.num_available
        if len(short) > num_available:
            short = self._preempt_for(short)
            num_available = self._space.pool.num_available
        for seq in short[:num_available]:
            self._space.extend(seq.table, 1)
        stalled = short[num_available:]  # their blocks come with the end of a step in flight, or of an export
        return [seq for seq in ready if seq.status is Status.DECODING and seq not in stalled]

    def _fitted(self, drafts: Drafts) -> Drafts:
        """Give the drafts blocks, as far as there are some that nobody who runs will need next; cut what is left over.

        The KV of a sequence's last token has its place already.
        """
        space, fitted = self._space, Drafts()
        for seq, tokens in drafts.items():
            end = seq.num_scheduled + 1 + len(tokens) + self._speculation.num_ahead
            num_new = space.blocks_for(min(end, seq.stops.max_len)) - len(seq.table.ids)
            num_spare = space.pool.num_available - self.num_running
            if num_new > 0 and num_spare > 0:
                space.extend(seq.table, min(num_new, num_spare))
            num_fitting = len(seq.table.ids) * space.block_size - seq.num_scheduled - 1
            if num_fitting > 0:
                fitted[seq] = tokens[:num_fitting]
        return fitted

    def _preempt_for(self, short: list[Sequence]) -> list[Sequence]:
        """Preempt the youngest until each of `short` has its block, now or when the steps in flight end.

        Returns who is still short, eldest first. An exported sequence is never preempted: a peer may be reading its
        blocks. Nor is the eldest of all, so that it always gets on; unless it holds blocks twice, its own and the
        cache's: then it goes back to start at once on the cache's, where all its KV is.
        """
        victims = sorted(
            (seq for seq in self._prefilling + self._decoding if not seq.is_export), key=attrgetter("rank")
        )
        while victims and len(short) > self._space.pool.num_available + self._space.num_returning:
            victim = victims.pop()
            if victims or victim.table.duplicates:
                self._preempt(victim)
                short = [seq for seq in short if seq is not victim]
        return sorted(short, key=attrgetter("rank"))

    def _preempt(self, sequence: Sequence) -> None:
        self.remove(sequence)
        self._space.close(sequence.table, sequence.last_step)
        sequence.rewind()
        self._waiting.push(sequence, self._num_uncached(sequence))

    def _pick_chunks(self, budget: int) -> dict[Sequence, int]:
        """Share `budget` tokens among the prompts: the eldest first, then the shortest, then the eldest again."""
        is_contended = len(self._prefilling) + len(self._waiting) > 1
        cap = self._config.max_prefill_chunk if is_contended else budget
        chunks: dict[Sequence, int] = {}
        shortest_last = sorted(self._prefilling, key=lambda seq: (seq.num_left, seq.rank), reverse=True)
        if shortest_last:
            eldest = min(shortest_last, key=attrgetter("rank"))
            shortest_last.remove(eldest)
            chunks[eldest] = min(self._most(eldest), cap, budget)
            budget -= chunks[eldest]
        candidate = self._next_waiting() if budget else None
        while budget and (shortest_last or candidate):
            if candidate and not (shortest_last and shortest_last[-1].num_left <= self._num_uncached(candidate)):
                sequence = candidate if self._start(candidate) else None
                candidate = self._next_waiting() if sequence else None
            else:
                sequence = shortest_last.pop()
            if sequence:
                chunks[sequence] = min(self._most(sequence), cap, budget)
                budget -= chunks[sequence]
        for sequence in chunks:
            more = min(self._most(sequence) - chunks[sequence], budget)
            chunks[sequence] += more
            budget -= more
        return chunks

    def _most(self, sequence: Sequence) -> int:
        """Tokens that a prompt may compute in one step.

        A peer gets an export's KV chunk by chunk, each while the next one computes. So a long one ends in a short
        chunk, the only one whose KV the peer must wait for; those before are whole ones, since a captured size has
        room for just that.
        """
        num_left, last = sequence.num_left, self._config.export_last_chunk
        if not sequence.is_export or len(sequence.tokens) - sequence.cached_tokens <= self._config.export_chunk:
            return num_left
        before_last = num_left - last
        return num_left if before_last < last // 2 else min(before_last, self._config.export_chunk)

    def _next_waiting(self) -> Sequence | None:
        """Return whose turn it is to start, unless a step in flight still samples its next token."""
        sequence = self._waiting.select(self._num_uncached, self._is_coming)
        return None if sequence is None or self._space.is_in_flight(sequence.last_step) else sequence

    def _match(self, sequence: Sequence) -> Match:
        num_tokens, block_size = len(sequence.tokens), self._space.block_size
        sequence.hash_blocks(block_size, num_tokens // block_size)
        return self._space.match(sequence.hashes, sequence.num_matchable)

    def _num_uncached(self, sequence: Sequence) -> int:
        return len(sequence.tokens) - self._match(sequence).num_blocks * self._space.block_size

    def _is_coming(self, sequence: Sequence) -> bool:
        """Whether the next block that the sequence lacks is being computed for another. Hashes are up to date."""
        return self._space.is_coming(sequence.hashes, len(sequence.tokens))

    def _start(self, sequence: Sequence) -> bool:
        """Move a waiting sequence to the running ones, with blocks for all its tokens; False when there is no room."""
        match = self._match(sequence)
        num_new = self._space.blocks_for(len(sequence.tokens)) - match.num_blocks
        if not self._room.enter(sequence, num_new + match.num_unheld):
            sequence.was_denied = True
            return False
        self._waiting.start(sequence)
        sequence.table = self._space.open(sequence.hashes, match.num_blocks)
        self._space.extend(sequence.table, num_new)
        sequence.num_computed = sequence.num_scheduled = match.num_blocks * self._space.block_size
        sequence.status = Status.PREFILLING
        self._prefilling.append(sequence)
        if sequence.num_preemptions == 0:
            sequence.cached_tokens = min(sequence.num_computed, sequence.request.prompt_len)
            self._started.append(sequence)
        return True

    def _chunk_row(self, sequence: Sequence, num_tokens: int, step: int) -> Row:
        start = sequence.num_scheduled
        end = sequence.num_scheduled = start + num_tokens
        is_last = end == len(sequence.tokens)
        sequence.last_step = step
        sequence.is_slot_ready = True
        if is_last:
            sequence.num_pending = 1
            self._prefilling.remove(sequence)
            self.join(sequence)
        return Row(sequence.slot, start, num_tokens, tuple(sequence.tokens[start:end]), sequence.table.ids, is_last)


def _decode_row(sequence: Sequence, step: int) -> Row:
    """Compute the KV of the last token, which only the device knows when its step is in flight, and sample."""
    start = sequence.num_scheduled
    tokens = () if sequence.num_pending else (sequence.tokens[-1],)
    sequence.num_scheduled = start + 1
    sequence.num_pending += 1
    sequence.last_step = step
    sequence.is_slot_ready = True
    return Row(sequence.slot, start, 1, tokens, sequence.table.ids, True)


def _draft_row(sequence: Sequence, drafts: Tokens[int], step: int) -> Row:
    """Compute the KV of the last token and of the drafts, and sample after each of them."""
    start, tokens = sequence.num_scheduled, (sequence.tokens[-1], *drafts)
    sequence.num_scheduled = start + len(tokens)
    sequence.num_pending += 1
    sequence.last_step = step
    sequence.is_slot_ready = True
    return Row(sequence.slot, start, len(tokens), tokens, sequence.table.ids, True, len(drafts))
