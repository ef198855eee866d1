"""What a gateway has served, and what it knows of the workers' loads: what the planner goes by."""

from __future__ import annotations

import msgspec
from prometheus_client import CollectorRegistry

from baton.actors.messages import Role
from baton.actors.step_cost import StepCost
from baton.router.membership import Membership
from baton.router.status import Totals


class WorkerUsage(msgspec.Struct, frozen=True, kw_only=True):
    worker_id: str
    role: Role
    num_running: int
    waiting_tokens: int  # uncached prompt tokens not yet computed
    cost: StepCost | None  # None: it has not fitted any yet
    kv_tokens: int  # that fit
    max_sequences: int
    step_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Totals since the gateway's start, and the present."""

    num_prompts: int = 0  # that got a first token
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_ended: int = 0  # sequences
    output_tokens: int = 0
    queued_tokens: int = 0  # prompt tokens that wait here for a turn
    workers: tuple[WorkerUsage, ...] = ()  # that can be sent to


def usage(registry: CollectorRegistry, membership: Membership) -> Usage:
    totals = Totals(registry).values

    def total(name: str) -> int:
        return int(totals.get(f"baton_gateway_{name}", 0.0))

    return Usage(
        num_prompts=total("ttft_seconds_count"),
        prompt_tokens=total("prompt_tokens_total"),
        cached_tokens=total("cached_tokens_total"),
        num_ended=total("choices_total"),
        output_tokens=total("output_tokens_total"),
        queued_tokens=total("queued_tokens"),
        workers=tuple(
            WorkerUsage(
                worker_id=stream.info.peer.worker_id,
                role=stream.info.role,
                num_running=stream.load.num_running,
                waiting_tokens=stream.load.waiting_tokens,
                cost=stream.load.cost,
                kv_tokens=stream.info.num_blocks * stream.info.block_size,
                max_sequences=stream.info.max_sequences,
                step_tokens=stream.info.step_tokens,
            )
            for stream in (*membership.decoders(), *membership.prefillers())
        ),
    )
