"""Speculation beside hand-overs: a prompt that a peer computed drafts as well as one that was computed here."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from test_worker import request, running, text
from worker_client import Client, settled

from baton.actors.worker import Worker
from baton.transfer.layout import LayoutMismatch, check_layout
from tests.actors.fake_engine import LAYOUT
from tests.fakes import fake_output


def verified_and_accepted(worker: Worker) -> tuple[list[int], list[int]]:
    counts = worker._built.drafts
    return counts.verified, counts.accepted


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
async def test_a_handed_over_prompt_gives_the_same_tokens_and_the_same_acceptance(drafter: str) -> None:
    speculation = {"drafter": drafter, "max_draft_tokens": 3, "length": "fixed", "min_match": 1}
    asked = [request(33, 40, seed=seed) for seed in (1, 2)]
    async with (
        running("prefill", "p0", overlap=False, speculation=speculation) as (p, p_info),
        running("decode", "d0", overlap=False, speculation=speculation) as (d, d_info),
        running("both", "alone", overlap=False, speculation=speculation) as (alone, alone_info),
        Client(d_info.peer.address) as handed_over,
        Client(alone_info.peer.address) as monolithic,
    ):
        for one in asked:
            outputs = await handed_over.finish(one, p_info.peer)
            assert text(outputs) == text(await monolithic.finish(one)) == fake_output(one, 40)
            served = outputs[-1].served
            assert served is not None and served.blocks_moved > 0
        assert verified_and_accepted(d) == verified_and_accepted(alone)
        assert sum(d._built.drafts.accepted) > 0 and not p._built.drafts.verified
        await settled(p)
        await settled(d)


def test_workers_whose_draft_layers_differ_refuse_each_other() -> None:
    ours = replace(LAYOUT, num_layers=2, drafter="eagle 1234")
    for theirs in (LAYOUT, replace(ours, drafter="eagle 9999"), replace(ours, drafter="mtp 1234")):
        with pytest.raises(LayoutMismatch, match="drafter: ours is 'eagle 1234'"):
            check_layout(ours, theirs)
    check_layout(ours, replace(ours))
