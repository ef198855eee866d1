from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec
import pytest
from fake_workers import FakeRunning, FakeWorker, counting
from rig import a_request, rig, tokens_of, until

from baton.actors.messages import Output, Submit
from baton.router.config import PolicyName, RouterConfig
from baton.router.errors import DeadlineExceeded, NoWorkers, Overloaded, WorkerFailed, WorkerLost

EXPECTED = [1000 + i for i in range(8)]


async def test_a_request_runs_to_its_end_and_leaves_nothing() -> None:
    async with rig(FakeWorker()) as router:
        outputs = await router.run(a_request())
        assert tokens_of(outputs) == EXPECTED
        assert [output.finish for output in outputs if output.finish] == ["length"]
        assert router.is_idle()


async def test_load_is_charged_before_the_worker_says_anything() -> None:
    worker = FakeWorker()
    worker.num_steps_allowed = 0
    async with rig(worker) as router:
        task = asyncio.create_task(router.run(a_request(prompt_len=64)))
        (stream,) = router.membership.decoders()
        await until(lambda: stream.num_own_requests == 1)
        assert stream.num_own_tokens == 64
        assert router.admission.num_tokens == 64
        worker.allow(1)
        await until(lambda: stream.num_own_tokens == 0)  # the prompt is computed; the request goes on
        assert (stream.num_own_requests, router.admission.num_requests) == (1, 0)
        worker.allow(100)
        await task
        assert router.is_idle()


async def test_closing_the_generator_cancels_the_request() -> None:
    worker = FakeWorker()
    worker.num_steps_allowed = 1
    async with rig(worker) as router:
        outputs = router.generate(a_request())
        await anext(outputs)
        await outputs.aclose()
        await until(lambda: worker.num_running == 0)
        assert worker.cancels == ["r"]
        assert router.is_idle()


async def test_cancelling_before_the_first_output_cancels_the_request() -> None:
    worker = FakeWorker()
    worker.num_steps_allowed = 0
    async with rig(worker) as router:
        task = asyncio.create_task(router.run(a_request()))
        await until(lambda: worker.num_running == 1)
        task.cancel()
        await until(lambda: worker.num_running == 0)
        assert router.is_idle()


async def lose_after(outputs: AsyncGenerator[Output, None], worker: FakeWorker, num_tokens: int) -> list[Output]:
    """Take `num_tokens` (the worker gives one a step), then kill the worker."""
    given = [await anext(outputs)]
    while len(tokens_of(given)) < num_tokens:
        given.append(await anext(outputs))
    await worker.kill()
    return given


async def test_a_dead_decode_worker_is_replaced_from_the_tokens_given() -> None:
    workers = [FakeWorker(worker_id="a"), FakeWorker(worker_id="b")]
    workers[0].num_steps_allowed = 3
    async with rig(*workers) as router:
        outputs = router.generate(a_request())
        given = await lose_after(outputs, workers[0], 3)
        given += [output async for output in outputs]
        assert tokens_of(given) == EXPECTED
        assert [output.cached_tokens for output in given if output.cached_tokens is not None] == [0]
        assert {output.request_id for output in given} == {"r"}
        (submit,) = workers[1].submits
        assert submit.request.num_output == 3
        assert submit.request.prompt_len == 64
        assert submit.request.tokens[-3:] == (1000, 1001, 1002)
        assert submit.request.deadline_s is not None and submit.request.deadline_s < 60.0
        assert router.is_idle()


async def test_with_no_worker_left_the_loss_is_a_retryable_error() -> None:
    worker = FakeWorker()
    worker.num_steps_allowed = 2
    async with rig(worker) as router:
        outputs = router.generate(a_request())
        await lose_after(outputs, worker, 2)
        with pytest.raises(WorkerLost, match="no other can go on") as caught:
            async for _ in outputs:
                pass
        assert caught.value.retryable
        assert router.is_idle()


async def test_a_lost_frame_makes_the_same_worker_go_on() -> None:
    worker = FakeWorker()
    worker.num_steps_allowed = 2
    async with rig(worker) as router:
        outputs = router.generate(a_request())
        given = [await anext(outputs)]
        worker.skips_frame = True
        worker.num_steps_allowed = None
        worker.wake()
        given += [output async for output in outputs]
        assert tokens_of(given) == EXPECTED


class Unheard(FakeWorker):
    """Every request's first frame is lost."""

    def _admitted(self, submit: Submit) -> FakeRunning:
        self.skips_frame = True
        return super()._admitted(submit)


async def test_a_request_that_is_lost_too_often_is_given_up() -> None:
    workers = [Unheard(worker_id=f"w{i}") for i in range(5)]
    async with rig(*workers, config=RouterConfig(max_attempts=3)) as router:
        with pytest.raises(WorkerLost, match="3 workers in turn"):
            await router.run(a_request())
        assert sum(len(worker.submits) for worker in workers) == 3
        assert router.is_idle()


async def test_workers_that_drain_hand_a_request_on_however_many_they_are() -> None:
    workers = [FakeWorker(worker_id=f"w{i}") for i in range(5)]
    for worker in workers[:4]:
        worker.drops_requests = True
    async with rig(*workers, config=RouterConfig(max_attempts=1)) as router:
        assert tokens_of(await router.run(a_request())) == EXPECTED
        assert 'migrations_total{reason="handed_back"} 4.0' in router.metrics.render().decode()
        for worker in workers:
            worker.drops_requests = True
        with pytest.raises(WorkerLost, match="no other can go on"):
            await router.run(a_request())
        assert router.is_idle()


async def test_a_worker_that_drops_a_request_does_not_get_it_again() -> None:
    workers = [FakeWorker(worker_id="a"), FakeWorker(worker_id="b")]
    workers[0].drops_requests = True
    async with rig(*workers) as router:
        assert tokens_of(await router.run(a_request())) == EXPECTED
        assert [len(worker.submits) for worker in workers] == [1, 1]


class Unfinishing(FakeWorker):
    """Dies before it can say that the last token was the last."""

    def _advance(self, running: FakeRunning) -> Output:
        return msgspec.structs.replace(super()._advance(running), finish=None)


async def test_if_only_the_finish_was_lost_the_request_is_complete() -> None:
    workers = [Unfinishing(worker_id="a"), FakeWorker(worker_id="b")]
    workers[0].num_steps_allowed = 3
    async with rig(*workers) as router:
        outputs = router.generate(a_request(max_tokens=3))
        given = await lose_after(outputs, workers[0], 3)
        given += [output async for output in outputs]
        assert len(tokens_of(given)) == 3
        assert given[-1].finish == "length"
        assert not workers[1].submits


async def test_an_error_of_the_worker_is_not_retried() -> None:
    workers = [FakeWorker(worker_id="a"), FakeWorker(worker_id="b")]
    workers[0].error = "out of blocks"
    async with rig(*workers) as router:
        with pytest.raises(WorkerFailed, match="out of blocks"):
            await router.run(a_request())
        assert not workers[1].submits
        assert router.is_idle()


async def test_a_worker_that_says_nothing_runs_into_the_deadline() -> None:
    worker = FakeWorker()
    worker.num_steps_allowed = 0
    async with rig(worker) as router:
        with pytest.raises(DeadlineExceeded):
            await router.run(msgspec.structs.replace(a_request(), deadline_s=0.05))
        await until(lambda: worker.cancels == ["r"])
        assert router.is_idle()


async def test_without_workers_it_refuses_at_once() -> None:
    async with rig() as router:
        with pytest.raises(NoWorkers, match="no decode worker has registered"):
            await router.run(a_request())


async def test_a_full_queue_refuses_before_anything_is_sent() -> None:
    worker = FakeWorker()
    worker.num_steps_allowed = 0
    async with rig(worker, config=RouterConfig(max_queued_requests=1)) as router:
        task = asyncio.create_task(router.run(a_request()))
        await until(lambda: worker.num_running == 1)
        with pytest.raises(Overloaded):
            await router.run(a_request("second"))
        assert len(worker.submits) == 1
        worker.allow(100)
        await task


async def test_a_prefill_worker_is_named_and_charged_until_the_first_token() -> None:
    decode, prefill = FakeWorker(worker_id="d", role="decode"), FakeWorker(worker_id="p", role="prefill")
    decode.num_steps_allowed = 0
    async with rig(decode, prefill) as router:
        task = asyncio.create_task(router.run(a_request()))
        await until(lambda: decode.num_running == 1)
        assert decode.submits[0].prefill == prefill.info().peer
        (p_stream,), (d_stream,) = router.membership.prefillers(), router.membership.decoders()
        assert (p_stream.num_own_requests, p_stream.num_own_tokens, d_stream.num_own_tokens) == (1, 64, 0)
        decode.allow(1)
        await until(lambda: p_stream.num_own_requests == 0)
        assert d_stream.num_own_requests == 1
        decode.allow(100)
        await task
        assert not prefill.submits
        assert router.is_idle()


async def test_a_conversation_returns_to_the_worker_that_holds_it() -> None:
    workers = [FakeWorker(worker_id=f"w{i}") for i in range(3)]
    async with rig(*workers, config=RouterConfig(predicted_prefix_s=0.001)) as router:
        for i in range(3):  # three conversations, one worker each
            await router.run(a_request(f"first{i}", first=1000 * (i + 1), max_tokens=32))
        assert [len(worker.submits) for worker in workers] == [1, 1, 1]
        for i, worker in enumerate(workers):
            answer = tuple(token for step in counting(worker.submits[0].request) for token in step)
            tokens = (*worker.submits[0].request.tokens, *answer, *range(7, 27))
            outputs = await router.run(msgspec.structs.replace(a_request(f"second{i}"), tokens=tokens))
            assert len(worker.submits) == 2
            assert outputs[0].cached_tokens == 96  # prompt and answer of the first turn


async def test_a_burst_of_siblings_follows_the_first_before_any_event() -> None:
    workers = [FakeWorker(worker_id=f"w{i}") for i in range(3)]
    for worker in workers:
        worker.num_steps_allowed = 0
    async with rig(*workers) as router:
        tasks = [asyncio.create_task(router.run(a_request(f"r{i}"))) for i in range(6)]
        await until(lambda: sum(worker.num_running for worker in workers) == 6)
        assert sorted(len(worker.submits) for worker in workers) == [0, 0, 6]
        for worker in workers:
            worker.allow(100)
        await asyncio.gather(*tasks)


async def test_different_salts_share_nothing() -> None:
    workers = [FakeWorker(worker_id=f"w{i}") for i in range(2)]
    async with rig(*workers) as router:
        await router.run(msgspec.structs.replace(a_request("a"), cache_salt="x"))
        await router.run(msgspec.structs.replace(a_request("b"), cache_salt="y"))
        assert [len(worker.submits) for worker in workers] == [1, 1]


async def test_a_warm_worker_that_died_is_not_chosen_for_its_cache() -> None:
    workers = [FakeWorker(worker_id=f"w{i}") for i in range(2)]
    async with rig(*workers) as router:
        await router.run(a_request("warm"))
        warm, cold = workers if workers[0].submits else reversed(workers)
        await warm.kill()
        await until(lambda: len(router.membership.decoders()) == 1)
        for i in range(10):
            await router.run(a_request(f"r{i}"))
        assert len(cold.submits) == 10


async def test_a_decision_and_how_right_its_prediction_was_are_counted() -> None:
    async with rig(FakeWorker(), config=RouterConfig(policy=PolicyName.COST)) as router:
        await router.run(a_request())
        samples = {
            (sample.name, *sample.labels.values()): sample.value
            for family in router.metrics.registry.collect()
            for sample in family.samples
        }
        assert samples["baton_router_decisions_total", "alone"] == 1
        assert samples["baton_router_ttft_error_ratio_count",] == 1
        assert samples["baton_router_predicted_ttft_seconds_sum",] > 0


async def test_who_waits_when_the_last_worker_dies_is_told_at_once() -> None:
    worker = FakeWorker()
    worker.num_steps_allowed, worker.step_tokens = 0, 32  # busy with one prompt of 64
    async with rig(worker) as router:
        running = asyncio.create_task(router.run(a_request("running")))
        await until(lambda: worker.num_running == 1)
        waiting = asyncio.create_task(router.run(a_request("waiting", first=500)))
        await until(lambda: router.admission.num_queued == 1)
        await worker.kill()
        results = await asyncio.gather(running, waiting, return_exceptions=True)
        assert [type(result) for result in results] == [WorkerLost, NoWorkers]
        assert len(worker.submits) == 1
        assert router.is_idle()


async def test_who_waits_goes_as_soon_as_the_worker_has_room() -> None:
    worker = FakeWorker()
    worker.num_steps_allowed, worker.step_tokens = 0, 32
    async with rig(worker) as router:
        tasks = [asyncio.create_task(router.run(a_request(f"r{i}", first=500 * i))) for i in range(5)]
        await until(lambda: router.admission.num_queued == 4)
        assert len(worker.submits) == 1
        worker.num_steps_allowed = None
        worker.wake()
        assert [tokens_of(outputs) for outputs in await asyncio.gather(*tasks)] == [EXPECTED] * 5
        assert router.is_idle()
