"""Public bug reports that two workers in one process can show; those that need processes are in tests/chaos."""

from __future__ import annotations

import msgspec

from baton.actors import rpc
from baton.actors.engine.request import SamplingParams
from baton.actors.messages import Output, Submit
from baton.actors.worker import Worker
from tests.actors.test_worker import Client, request, running, settled, text
from tests.fakes import fake_output


def num_generated(worker: Worker) -> float:
    labels = {"worker": worker.worker_id}
    return worker._metrics.registry.get_sample_value("baton_generated_tokens_total", labels) or 0.0


async def test_prefill_samples_one_token_whatever_the_client_asks_for() -> None:
    """Entry S15: fields that lengthen or shape the output reach decode unchanged and do not make prefill decode."""
    async with running("prefill", "p0") as (p, p_info), running("decode", "d0") as (d, d_info):
        async with Client(d_info.peer.address) as client:
            asked = request(30, 20)
            shaped = SamplingParams(
                max_tokens=20, min_tokens=20, seed=3, stop_token_ids=(7, 8), logprobs=0, ignore_eos=True, top_k=5
            )
            asked = msgspec.structs.replace(asked, sampling=shaped)
            outputs = await client.finish(asked, p_info.peer)
        assert text(outputs) == fake_output(asked, 20)
        assert sum(len(output.logprobs or ()) for output in outputs) == 20
        assert num_generated(p) == 1 and num_generated(d) == 19
        await settled(p)


async def test_fields_that_are_not_the_requests_own_do_not_reach_the_worker() -> None:
    """Entry S16: a frame with a protocol's internal names in it is the frame without them."""
    submit = Submit(request(8, 2))
    frame = msgspec.to_builtins(submit)
    internal = {"attempt": 3, "epoch": 9, "blocks": [1, 2], "skip_blocks": 1, "export": True, "is_export": True}
    frame |= internal
    frame["request"] |= internal
    assert rpc.decode_to_worker(rpc.encode(frame)) == submit


async def test_a_prefill_that_fails_beside_one_that_decodes_ends_both_exactly_once() -> None:
    """Entry S18: the error of one and the tokens of the other come out of the same step."""
    async with running("prefill", "p0", num_blocks=16) as (p, p_info), running("decode", "d0") as (d, d_info):
        async with Client(p_info.peer.address) as of_p, Client(d_info.peer.address) as of_d:
            beside = request(8, 40, seed=2)
            of_p.send(Submit(beside))
            too_large_for_p = request(80, 6, seed=3)
            assert text(await of_d.finish(too_large_for_p, p_info.peer)) == fake_output(too_large_for_p, 6)
            too_large = request(300, 6, seed=4)
            of_p.send(Submit(too_large))
            got: list[Output] = []
            async for output in of_p.outputs():
                got.append(output)
                if sum(output.finish is not None for output in got) == 2:
                    break
            after = request(8, 2, seed=5)
            got += await of_p.finish(after)
        assert text([o for o in got if o.request_id == beside.id]) == fake_output(beside, 40)
        ends = {one.id: [o.finish for o in got if o.request_id == one.id and o.finish] for one in (beside, too_large)}
        assert ends == {beside.id: ["length"], too_large.id: ["error"]}
        await settled(p)
        await settled(d)
