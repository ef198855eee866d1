"""One worker's engine: requests in, one step at a time, updates out.

Pure: no thread, no clock, no network; one thread owns it. Joins the scheduler, the blocks and a `Runner`, and keeps at
most one step in flight beside the one just launched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from baton.actors.engine.batch import Batch, PendingStep, Row, Runner
from baton.actors.engine.block_hash import BlockHash
from baton.actors.engine.block_space import BlockSpace, BlockTable
from baton.actors.engine.config import EngineConfig
from baton.actors.engine.draft_length import DecodeCost
from baton.actors.engine.errors import DuplicateRequest, ImportStateError, NoProgress, RequestEnded, RequestTooLarge
from baton.actors.engine.imports import ImportOpened, Imports, QuarantineKey
from baton.actors.engine.prefix_cache import CacheEvents, NoCache, PrefixCache
from baton.actors.engine.request import FinishReason, Request, TokenLogprobs
from baton.actors.engine.room import Room
from baton.actors.engine.scheduler import Plan, Scheduler
from baton.actors.engine.sequence import Accepted, Rank, Sequence, Status
from baton.actors.engine.speculation import NoSpeculation, Speculation
from baton.actors.engine.stopping import StopRules
from baton.actors.engine.updates import BlockCounts, Update
from baton.actors.engine.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class _Launched:
    number: int
    pending: PendingStep
    rows: tuple[Row, ...]
    sequences: list[Sequence]


class Engine:
    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        *,
        num_blocks: int,
        max_context: int,
        eos_token_ids: frozenset[int],
        speculation: Speculation | None = None,
    ) -> None:
        """`num_blocks` and `max_context` are what the worker really has; config's own fields of these names, if set,
        have been obeyed by whoever found that out."""
        self._runner = runner
        self._overlap = config.overlap is not False
        self._eos_token_ids = eos_token_ids
        self._speculation = speculation or NoSpeculation()
        cache = PrefixCache() if config.prefix_cache else NoCache()
        self._space = BlockSpace(num_blocks, config.block_size, cache, self._speculation.num_recomputed)
        self._capacity = min(max_context, num_blocks * config.block_size)
        self._room = Room(
            self._space,
            config.max_num_seqs,
            headroom_blocks=config.headroom_blocks,
            max_preemptions=config.max_preemptions,
        )
        waiting = WaitingQueue(config.max_overtakes)
        self._scheduler = Scheduler(self._space, self._room, waiting, config, self._speculation)
        self._imports = Imports(self._space, self._room)
        self._sequences: dict[str, Sequence] = {}  # all that hold or will hold something, imports apart
        self._adopted: list[Sequence] = []  # what they brought is not yet in the cache
        self._in_flight: deque[_Launched] = deque()
        self._planned: Plan | None = None  # decided, not yet launched
        self._queued: list[Update] = []  # what calls between steps have to tell
        self._num_arrivals = 0
        self._num_steps = 0
        self._is_blocked = False  # nothing can be scheduled until somebody calls

    # Requests that are computed here.

    def submit(self, request: Request, *, export: bool = False) -> None:
        """Queue the request. What cannot be served ends with an error update of the next step.

        An exported sequence ends with its first token; its updates carry its block table and, chunk by chunk, how
        much of it is complete; its blocks stay held until `release`.
        """
        self._check_new(request.id)
        self._is_blocked = False
        try:
            self._check_fits(request)
        except RequestTooLarge as error:
            self._queued.append(Update(request.id, finish="error", error=str(error)))
            return
        sequence = self._sequence(request, export=export)
        if (finish := sequence.stops.ended(request)) is not None:
            self._queued.append(Update(request.id, finish=finish))
            return
        self._sequences[request.id] = sequence
        self._scheduler.add(sequence)

    def cancel(self, request_id: str) -> QuarantineKey | None:
        """End a request in any state; no update of it follows. Fine for unknown ids.

        Returns a key only for an import whose blocks were reserved: a peer may be writing them, so they are
        quarantined and the caller owes a `release_quarantine`.
        """
        self._is_blocked = False
        self._queued = [update for update in self._queued if update.request_id != request_id]
        if request_id in self._imports:
            return self._imports.abandon(request_id, quarantine=True)
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end(sequence)
        return None

    def release(self, request_id: str) -> None:
        """Let go of a finished export's blocks; the full ones stay in the cache. Fine if that was done before."""
        self._is_blocked = False
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.status is Status.EXPORTED:
            self._end(sequence)

    def stop_export(self, request_id: str) -> None:
        """Compute an export no further; what it holds stays held until `release`. Idempotent."""
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.status is not Status.EXPORTED:
            self._scheduler.remove(sequence)
            self._space.forsake(sequence.table)
            sequence.status = Status.EXPORTED

    # Requests whose prompt is computed by a peer.

    def open_import(self, request: Request) -> ImportOpened:
        """Hold what the local cache has of the prompt. Raises RequestTooLarge or RequestEnded where nothing can follow.

        What is held here can keep others waiting: abandon an import that gets no place for long.
        """
        self._check_new(request.id)
        self._check_fits(request)
        sequence = self._sequence(request, export=False)
        if (finish := sequence.stops.ended(request)) is not None:
            raise RequestEnded(request.id, finish)
        return self._imports.open(sequence)

    def is_import_open(self, request_id: str) -> bool:
        return request_id in self._imports

    def reserve_import(self, request_id: str) -> tuple[int, ...] | None:
        """Reserve our blocks for the prompt's blocks skip_blocks..num_blocks; None while there is no room.

        Ask again after a step: the refusal keeps the import's turn, but nobody calls back.
        """
        return self._imports.reserve(request_id)

    def adopt_import(self, request_id: str, tokens: tuple[int, ...], drafts: tuple[int, ...] = ()) -> None:
        """All KV of the prompt is in place: decode on after the peer's one token, which the caller has delivered.

        `drafts` are what the peer's draft module proposes to follow it.
        """
        if len(tokens) != 1:
            raise ImportStateError(request_id, f"a peer's prefill yields one token, not {len(tokens)}")
        self._is_blocked = False
        sequence = self._imports.adopt(request_id)
        sequence.drafts = drafts
        self._sequences[request_id] = sequence
        self._adopted.append(sequence)
        self._scheduler.join(sequence)
        accepted = sequence.accept(tokens)
        if accepted.finish is not None:
            self._queued.append(self._update(sequence, (), None, accepted.finish))
            self._publish_adopted()
            self._end(sequence)

    def abandon_import(self, request_id: str, *, quarantine: bool) -> QuarantineKey | None:
        """Give up an import; the request may be submitted afresh at once.

        With `quarantine` the reserved blocks, if there are any, stay held until `release_quarantine(key)`.
        """
        self._is_blocked = False
        return self._imports.abandon(request_id, quarantine=quarantine)

    def release_quarantine(self, key: QuarantineKey) -> None:
        """No peer writes those blocks any more. Fine if that was said before."""
        self._is_blocked = False
        self._imports.release(key)

    # Steps.

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do. False also when all that is left waits for a call, e.g. a release."""
        if self._queued or self._in_flight:
            return True
        return not self._is_blocked and bool(self._scheduler.num_running or self._scheduler.num_waiting)

    def step(self) -> list[Update]:
        """Take one whole step."""
        return [*self.plan(), *self.run()]

    def plan(self) -> list[Update]:
        """Decide the next step, and tell who starts with it, before the device is busy. `run` must follow at once."""
        updates, self._queued = self._queued, []
        if self._space.pool.num_available < self._scheduler.num_running:
            self._publish_adopted()  # or one that is preempted now would lose its KV
        self._planned = self._scheduler.schedule(self._num_steps + 1)
        if self._planned is not None:
            updates += [self._update(seq, (), None, None) for seq in self._planned.started]
        return updates

    def run(self) -> list[Update]:
        """Launch the planned step, then take in the step before (with overlap) or the same one (without)."""
        plan, self._planned = self._planned, None
        if plan is not None:
            self._launch(plan)
        elif not self._in_flight:
            self._block()
        self._publish_adopted()  # while the device works: nobody waits for it
        updates: list[Update] = []
        num_left = 1 if plan is not None and self._overlap and not self._speculation.needs_result else 0
        while len(self._in_flight) > num_left:
            self._commit(self._in_flight.popleft(), updates)
        return updates

    # What others want to know.

    @property
    def planned(self) -> Batch | None:
        """The batch that `run` will launch."""
        return None if self._planned is None else self._planned.batch

    @property
    def num_in_flight(self) -> int:
        """Steps that are launched and not yet waited for."""
        return len(self._in_flight)

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens not yet computed, without those that the cache held when their request came."""
        return self._scheduler.waiting_tokens

    @property
    def waiting_context(self) -> float:
        """Sum over these tokens of the positions that each attends to: what attention adds to their cost."""
        return self._scheduler.waiting_context

    def counts(self) -> BlockCounts:
        return self._space.pool.counts()

    def take_events(self) -> CacheEvents:
        """Return which block hashes became matchable or ceased to be, net, since the last call."""
        return self._space.cache.take_events()

    def snapshot(self) -> list[BlockHash]:
        """Return every matchable block hash. It includes what the next `take_events` will repeat."""
        return self._space.cache.snapshot()

    def note_cost(self, cost: DecodeCost | None) -> None:
        """Say what steps cost, as far as it is known: it decides how much is drafted."""
        self._speculation.note_cost(cost)

    def flush_cache(self) -> None:
        """Forget all cached prefixes, e.g. because the weights changed. What runs goes on, and publishes no more."""
        self._is_blocked = False
        self._space.flush(self._tables())

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every block is accounted for."""
        self._space.check_integrity(self._tables())

    def _launch(self, plan: Plan) -> None:
        self._num_steps += 1
        pending = self._runner.launch(plan.batch)
        self._in_flight.append(_Launched(self._num_steps, pending, plan.batch.rows, plan.sequences))

    def _publish_adopted(self) -> None:
        for sequence in self._adopted:
            if sequence.status is Status.DECODING:  # else it was cancelled at once
                self._space.publish(sequence.table, sequence.hashes, len(sequence.hashes))
        self._adopted.clear()

    def _block(self) -> None:
        """Nothing runs and nothing can: wait for whoever holds blocks from outside; if nobody does, fail."""
        self._is_blocked = True
        num_waiting, num_running = self._scheduler.num_waiting, self._scheduler.num_running
        is_held = self._imports.holds_blocks or any(s.status is Status.EXPORTED for s in self._sequences.values())
        if (num_waiting or num_running) and not is_held:
            raise NoProgress(num_waiting, num_running, self._space.pool.num_available)

    def _commit(self, step: _Launched, updates: list[Update]) -> None:
        """Wait for the step, then take in what it computed and sampled."""
        output = step.pending.wait()
        self._space.complete(step.number)
        block_size = self._space.block_size
        for index, part in output.prompts.items():
            if (record := step.sequences[index].prompt) is not None:
                record.take(part)
        rows = self._speculation.settle(step.rows, step.sequences, output)
        for seq, row, tokens, logprobs in zip(step.sequences, rows, output.tokens, output.logprobs, strict=True):
            if seq.status in (Status.FINISHED, Status.EXPORTED):
                continue  # cancelled or stopped, or the one step too many after its end was sampled
            accepted = seq.accept(tokens)
            if seq.status is not Status.WAITING:  # else preempted since: its KV is gone, the sampled token is not
                seq.num_computed = row.end
                num_full = min(row.end, len(seq.tokens)) // block_size  # drafts behind the end are nobody's tokens
                if num_full > len(seq.table.path):
                    seq.hash_blocks(block_size, num_full)
                    self._space.publish(seq.table, seq.hashes, num_full)
            if row.sample:
                self._take(seq, accepted, tokens, logprobs, updates)
            elif seq.is_export:
                updates.append(self._update(seq, (), None, None))

    def _take(
        self,
        sequence: Sequence,
        accepted: Accepted,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] | None,
        updates: list[Update],
    ) -> None:
        """Tell of the tokens that a step gave, and end the sequence if they do."""
        sequence.num_pending -= 1
        if accepted.num_tokens < len(tokens):
            tokens = tokens[: accepted.num_tokens]
            logprobs = None if logprobs is None else logprobs[: accepted.num_tokens]
        updates.append(self._update(sequence, tokens, logprobs, accepted.finish))
        if accepted.finish is None:
            return
        if sequence.is_export:
            self._scheduler.remove(sequence)
            sequence.status = Status.EXPORTED
        else:
            self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        """Let go of everything that the sequence holds, wherever it stands."""
        if sequence.status is not Status.EXPORTED:
            self._scheduler.remove(sequence)
        self._space.close(sequence.table, sequence.last_step)
        self._speculation.forget(sequence)
        sequence.status = Status.FINISHED
        del self._sequences[sequence.request.id]

    def _update(
        self,
        sequence: Sequence,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] | None,
        finish: FinishReason | None,
    ) -> Update:
        return Update(
            request_id=sequence.request.id,
            tokens=tokens,
            logprobs=logprobs,
            prompt=sequence.take_prompt_output() if tokens else None,
            finish=finish,
            cached_tokens=sequence.cached_tokens,
            num_computed=sequence.num_computed,
            blocks=tuple(sequence.table.ids) if sequence.is_export else (),
            drafts=sequence.drafts if sequence.is_export else (),
        )

    def _sequence(self, request: Request, *, export: bool) -> Sequence:
        self._num_arrivals += 1
        capacity = min(self._capacity, len(request.tokens) + 1) if export else self._capacity
        stops = StopRules.of(request, self._eos_token_ids, capacity)
        return Sequence(request, Rank(request.priority, self._num_arrivals), stops, is_export=export)

    def _check_new(self, request_id: str) -> None:
        if request_id in self._sequences or request_id in self._imports:
            raise DuplicateRequest(request_id)

    def _check_fits(self, request: Request) -> None:
        if request.prompt_len >= self._capacity:
            raise RequestTooLarge(
                request.prompt_len,
                self._capacity,
                self._space.blocks_for(request.prompt_len + 1),
                self._space.pool.num_blocks,
            )

    def _tables(self) -> Iterator[BlockTable]:
        yield from (sequence.table for sequence in self._sequences.values())
        yield from self._imports.tables()
