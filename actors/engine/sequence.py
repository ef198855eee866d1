"""A request's life on one worker. Mutable; owned by whatever holds it: queue, scheduler or imports, never two."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from baton.actors.engine.block_hash import BlockHash, block_hashes, child_hash, root_hash
from baton.actors.engine.block_space import BlockTable
from baton.actors.engine.prompt_record import PromptRecord
from baton.actors.engine.request import FinishReason, PromptOutput, Request
from baton.actors.engine.stopping import StopRules


class Status(Enum):
    WAITING = auto()  # in the queue, holds nothing
    IMPORTING = auto()  # its prompt's KV comes from a peer
    PREFILLING = auto()  # known tokens are left to compute
    DECODING = auto()  # waits only for its own next token
    EXPORTED = auto()  # finished; its blocks wait for `release`
    FINISHED = auto()  # holds nothing; steps in flight may still name it


class Rank(NamedTuple):
    """Who keeps its blocks when they run out: the smaller. Fixed for a sequence's life."""

    priority: int
    arrival: int


class Turn(NamedTuple):
    """Who enters first: the smaller. Among equals those who ran before, then those who came before."""

    priority: int
    is_new: bool
    arrival: int


class Accepted(NamedTuple):
    num_tokens: int  # how many of the sampled tokens count; the rest lies behind the end
    finish: FinishReason | None


@dataclass(slots=True, eq=False)
class Sequence:
    """
    0          num_computed   num_scheduled   len(tokens)   len(tokens) + num_pending
    |-- KV complete --|-- in flight --|-- to do --|-- sampled, ids not yet known --|
    """

    request: Request
    rank: Rank
    stops: StopRules
    is_export: bool = False
    status: Status = Status.WAITING
    tokens: list[int] = field(init=False)
    hashes: list[BlockHash] = field(default_factory=list[BlockHash])  # of the leading full blocks of `tokens`
    table: BlockTable = field(default_factory=BlockTable)
    slot: int = 0  # meaningful while PREFILLING or DECODING
    is_slot_ready: bool = False  # the runner has built the sampling state in `slot`
    num_computed: int = 0
    num_scheduled: int = 0
    num_pending: int = 0
    last_step: int = 0  # the last launched step with a row of this sequence
    cached_tokens: int = 0  # prompt tokens that were not computed here
    num_preemptions: int = 0
    num_overtaken: int = 0  # later requests that started while this one waited longest
    was_denied: bool = False  # it was this one's turn, but there was no room
    prompt: PromptRecord | None = None  # until its first token is sampled
    drafts: tuple[int, ...] = ()  # what a draft module proposes to follow `tokens`

    def __post_init__(self) -> None:
        self.tokens = list(self.request.tokens)
        if self.request.prompt is not None and self.request.num_output == 0:
            self.prompt = PromptRecord(self.request.prompt, len(self.tokens))

    @property
    def turn(self) -> Turn:
        return Turn(self.rank.priority, self.num_preemptions == 0, self.rank.arrival)

    @property
    def num_left(self) -> int:
        """Known tokens whose computation is not yet scheduled."""
        return len(self.tokens) - self.num_scheduled

    @property
    def num_matchable(self) -> int:
        """Leading tokens whose KV may come from the cache, and the one after them."""
        is_whole = self.prompt is not None and self.prompt.params.is_of_every_token
        return 1 if is_whole else len(self.tokens)

    def take_prompt_output(self) -> PromptOutput | None:
        """Return what was asked about the prompt, once."""
        record, self.prompt = self.prompt, None
        return None if record is None else record.output()

    def hash_blocks(self, block_size: int, num_blocks: int) -> None:
        """Bring `hashes` up to the first `num_blocks` blocks, which are full."""
        tokens, hashes = self.tokens, self.hashes
        if not hashes:
            root = root_hash(self.request.cache_salt)
            hashes.extend(block_hashes(tokens[: num_blocks * block_size], block_size, root))
        for start in range(len(hashes) * block_size, num_blocks * block_size, block_size):
            hashes.append(child_hash(hashes[-1], tokens[start : start + block_size]))

    def accept(self, sampled: tuple[int, ...]) -> Accepted:
        """Append sampled tokens, up to the first that ends the sequence."""
        tokens = self.tokens
        for num, token in enumerate(sampled, 1):
            tokens.append(token)
            finish = self.stops.reason(token, len(tokens))
            if finish is not None:
                return Accepted(num, finish)
        return Accepted(len(sampled), None)

    def rewind(self) -> None:
        """Forget all KV and go back to waiting; the tokens stay."""
        self.status = Status.WAITING
        self.table = BlockTable()
        self.is_slot_ready = self.was_denied = False
        self.drafts = ()
        self.num_computed = self.num_scheduled = 0
        self.num_preemptions += 1
