"""The planner of a running cluster switches a worker's role by itself, and no request notices.

Run by hand: `python -m tests.acceptance.planner_acts`. One prefill and three decode workers with a fake device get long
prompts and want short answers: two should prefill. Ends with 1 where none was switched, or a request failed.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter

import httpx
import ray

from baton.cluster.operate import Operator
from baton.cluster.ray_launcher import NAMESPACE
from tests.cluster.fake_cluster import MODEL, build_fake_worker, fake_config

LIMIT_S = 60.0
CONFIG = fake_config(
    name="planned",
    pools={"prefill": {"replicas": 1, "num_cpus": 0.5}, "decode": {"replicas": 3, "num_cpus": 0.5}},
    router={"policy": "cache_aware"},
    planner={"mode": "act", "interval_s": 2, "settle_s": 4, "ttft_ms": 1500},
)


async def client(address: str, number: int, ends: Counter[int], is_over: asyncio.Event) -> None:
    dice = random.Random(number)
    async with httpx.AsyncClient(base_url=address, timeout=60) as http:
        while not is_over.is_set():
            prompt = [dice.randrange(1, 40) for _ in range(600)]
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
            ends[(await http.post("/v1/completions", json=body)).status_code] += 1


async def play() -> bool:
    operator = Operator(CONFIG.name)
    await operator.up(CONFIG, worker=build_fake_worker)
    status = await operator.until_settled(120)
    ends, is_over = Counter[int](), asyncio.Event()
    try:
        async with asyncio.TaskGroup() as tasks:
            for number in range(8):
                tasks.create_task(client(status.gateways[0], number, ends, is_over))
            began = time.monotonic()
            while (status := await operator.status()).desired["prefill"] < 2 and time.monotonic() - began < LIMIT_S:
                await asyncio.sleep(0.2)
            print(f"{status.desired} after {time.monotonic() - began:.1f} s", flush=True)
            await asyncio.sleep(3)
            is_over.set()
        plan = await operator.plan()
        for reason in plan.decision.reasons if plan.decision else ():
            print(f"{reason.what}: {reason.value:.3g} {reason.unit}, {reason.because}")
        restarts = [process.name for process in (await operator.status()).processes if process.num_restarts]
        print(f"answers by status {dict(ends)}, restarted {restarts or 'nobody'}")
        return status.desired["prefill"] >= 2 and ends.keys() == {200} and not restarts
    finally:
        await operator.down()


def main() -> int:
    ray.init(address="local", num_cpus=4, include_dashboard=False, namespace=NAMESPACE, log_to_driver=False)
    try:
        return 0 if asyncio.run(play()) else 1
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
