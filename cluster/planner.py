"""How many workers should prefill and how many decode: a pure function of the load, the costs and the targets.

`plan` is called every few seconds with what was seen since the last call, and returns what to do with the reasons.
It moves no worker itself: the controller does so by switching roles, and asks Ray for more where `wanted` says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, inf
from typing import NamedTuple

from baton.actors.step_cost import StepCost, StepShape

FULLEST = 0.95  # share of a prefill worker's time that is planned for at most
CONTEXT_SPREAD = 1.0  # squared coefficient of variation of a prompt's work: real traces have 0.5 to 2
LEVEL, TREND = 0.5, 0.3  # how fast the forecast follows what is seen, and how it changes


class Split(NamedTuple):
    prefill: int
    decode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What was asked of all workers together over the last `seconds`. Means are over requests."""

    seconds: float
    num_requests: int  # that arrived
    prompt_len: float = 0.0
    output_len: float = 0.0  # of those that ended; 0 while unknown
    hit_rate: float = 0.0  # share of prompt tokens that are not computed
    acceptance: float = 1.0  # tokens that a sequence gets from one decode step
    waiting_tokens: int = 0  # uncached prompt tokens not yet computed, now
    num_decoding: int = 0  # sequences that decode, now

    @property
    def rate(self) -> float:
        return self.num_requests / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """Targets in ms, and how reluctantly workers are moved."""

    ttft_ms: float = 2000.0
    itl_ms: float = 50.0
    headroom: float = 0.8  # share of a target, or of a worker, that is planned for
    min_gain: float = 0.1  # a move must make the busier role so much less busy, as a share of its load
    calm: float = 0.5  # while the busier role is busy at most so much, nobody moves
    settle_s: float = 10.0  # between two moves
    drain_s: float = 10.0  # in which what waits for prefill is to be computed
    min_prefill: int = 1
    min_decode: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """What one worker can do; all are taken to be alike."""

    cost: StepCost = field(default_factory=StepCost)
    kv_tokens: int = 800_000
    max_sequences: int = 256
    step_tokens: int = 4096


class Load(NamedTuple):
    """How many workers' worth of each kind of work there is."""

    prefill: float
    decode: float

    def on(self, split: Split) -> float:
        """How busy the busier role is."""
        return max(work / num if num else inf if work else 0.0 for work, num in zip(self, split, strict=True))


class Trend(NamedTuple):
    """A level and its change from one call to the next (Holt's method)."""

    level: float
    change: float = 0.0

    def seen(self, value: float) -> Trend:
        level = LEVEL * value + (1 - LEVEL) * (self.level + self.change)
        return Trend(level, TREND * (level - self.level) + (1 - TREND) * self.change)

    @property
    def next(self) -> float:
        return max(self.level + self.change, 0.0)


@dataclass(frozen=True, slots=True)
class Memory:
    """What the next call of `plan` must know of the last ones."""

    prefill: Trend | None = None  # workers' worth of load
    decode: Trend | None = None
    moved_at_s: float = -inf


class Reason(NamedTuple):
    """One line of the explanation."""

    what: str
    value: float
    unit: str
    because: str


@dataclass(frozen=True, slots=True)
class Decision:
    """`split` is what the present workers should be; `wanted` what the load needs, to ask an autoscaler for."""

    split: Split
    wanted: Split
    load: Load  # that both are for
    reasons: tuple[Reason, ...]
    memory: Memory


def plan(
    demand: Demand, now: Split, limits: WorkerLimits, goals: Goals, *, now_s: float, memory: Memory = Memory()
) -> Decision:
    """Decide how many of the present workers (`now`) prefill and how many decode. Raises ValueError for fewer than two.

    `now_s` is any clock that only goes forward. Calling it and ignoring the decision is a dry run.
    """
    total = sum(now)
    if total < 2:
        raise ValueError(f"{total} workers cannot be split into prefill and decode: have at least 2, or one as both")
    prefill, prefill_reasons = _prefill_load(demand, limits, goals)
    decode, decode_reasons = _decode_load(demand, limits, goals)
    prefill_trend = memory.prefill.seen(prefill) if memory.prefill else Trend(prefill)
    decode_trend = memory.decode.seen(decode) if memory.decode else Trend(decode)
    # A rise is believed at once: those who wait for it are late already. A fall must last.
    load = Load(max(prefill, prefill_trend.next), max(decode, decode_trend.next))
    split, verdict = _reluctantly(_balanced(load, total, goals), now, load, goals, now_s - memory.moved_at_s)
    reasons = (
        Reason("requests", demand.rate, "/s", f"{demand.num_requests} in {demand.seconds:g} s"),
        *prefill_reasons,
        *decode_reasons,
        Reason("prefill load, forecast", load.prefill, "workers", "the higher of what is seen and its trend"),
        Reason("decode load, forecast", load.decode, "workers", "the higher of what is seen and its trend"),
        verdict,
    )
    wanted = Split(max(ceil(load.prefill), goals.min_prefill), max(ceil(load.decode), goals.min_decode))
    moved_at_s = memory.moved_at_s if split == now else now_s
    return Decision(split, wanted, load, reasons, Memory(prefill_trend, decode_trend, moved_at_s))


def _prefill_load(demand: Demand, limits: WorkerLimits, goals: Goals) -> tuple[float, list[Reason]]:
    """Count the prefill workers that the load keeps as busy as the target for the first token allows.

    One worker is a queue with random arrivals: its mean wait is that of Pollaczek and Khinchine.
    """
    cached = demand.hit_rate * demand.prompt_len
    uncached = demand.prompt_len - cached
    cost, num_steps = limits.cost, max(uncached / limits.step_tokens, 1.0)
    own_ms = cost.prefill_part_ms(StepShape(1, cached + 0.5 * uncached)) * uncached + cost.constant_ms * num_steps
    wait_ms = goals.headroom * goals.ttft_ms - own_ms
    fullness = 2 * wait_ms / (2 * wait_ms + own_ms * (1 + CONTEXT_SPREAD)) if wait_ms > 0 else 0.0
    because = f"so that a prompt waits at most {max(wait_ms, 0):.0f} ms"
    if fullness <= 0:
        because = f"no number of workers answers in {goals.headroom:.0%} of {goals.ttft_ms:.0f} ms"
    fullness = min(fullness or FULLEST, FULLEST, goals.headroom)
    backlog_ms = demand.waiting_tokens * own_ms / max(uncached, 1.0)
    busy = (demand.rate * own_ms + backlog_ms / goals.drain_s) / 1e3
    return busy / fullness, [
        Reason("prefill of a prompt", own_ms, "ms", f"{uncached:.0f} of {demand.prompt_len:.0f} tokens are not cached"),
        Reason("prefill worker at most", fullness, "busy", because),
        Reason("prefill load, seen", busy / fullness, "workers", f"{demand.waiting_tokens} tokens wait besides"),
    ]


def _decode_load(demand: Demand, limits: WorkerLimits, goals: Goals) -> tuple[float, list[Reason]]:
    """Count the decode workers that the load fills as far as the target between tokens, KV and seats allow."""
    cost, context = limits.cost, demand.prompt_len + 0.5 * demand.output_len
    each_ms = cost.decode_ms + cost.decode_token_ms * context
    by_target = (goals.headroom * goals.itl_ms * demand.acceptance - cost.constant_ms) / max(each_ms, 1e-9)
    by_kv = goals.headroom * limits.kv_tokens / max(demand.prompt_len + demand.output_len, 1.0)
    batch, because = min(
        (by_target, "by the target between tokens"), (by_kv, "by KV memory"), (limits.max_sequences, "by seats")
    )
    batch = max(batch, 1.0)
    step_ms = cost.constant_ms + each_ms * batch
    tokens_s = 1e3 * batch * demand.acceptance / step_ms
    arriving = demand.rate * demand.output_len / tokens_s
    present = demand.num_decoding / batch
    return max(arriving, present), [
        Reason("decode batch at most", batch, "sequences", because),
        Reason("a decode worker's output", tokens_s, "tokens/s", f"in steps of {step_ms:.1f} ms"),
        Reason(
            "decode load, seen", max(arriving, present), "workers", f"{arriving:.2f} arrive, {present:.2f} are there"
        ),
    ]


def _balanced(load: Load, total: int, goals: Goals) -> Split:
    """Return the split whose busier role is least busy; of equals the one with more prefill workers."""
    splits = (Split(p, total - p) for p in range(total - goals.min_decode, goals.min_prefill - 1, -1))
    return min(splits, key=lambda split: load.on(split), default=Split(total - 1, 1))


def _reluctantly(best: Split, now: Split, load: Load, goals: Goals, settled_s: float) -> tuple[Split, Reason]:
    """Move only where it helps enough, and not while the last move settles."""
    before, after = load.on(now), load.on(best)
    name = f"{best.prefill}P{best.decode}D would be {after:.0%} busy, {now.prefill}P{now.decode}D is {before:.0%}"
    if best == now:
        return now, Reason("stay", 0, "moved", f"{now.prefill}P{now.decode}D is the best split, {before:.0%} busy")
    if before <= goals.calm:
        return now, Reason("stay", 0, "moved", f"{name}: calm enough, at most {goals.calm:.0%}")
    if settled_s < goals.settle_s:
        return now, Reason("wait", 0, "moved", f"the last move is {settled_s:.0f} s ago, of {goals.settle_s:g}; {name}")
    if 0 in now or before - after > goals.min_gain * before:
        return best, Reason("move", abs(best.prefill - now.prefill), "moved", name)
    return now, Reason("stay", 0, "moved", f"{name}: less than {goals.min_gain:.0%} better")
