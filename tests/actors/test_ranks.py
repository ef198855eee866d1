"""The processes of a tensor-parallel worker live and end together, within seconds and whatever ends them."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from rank_mains import ends_after_meeting, ends_at_once
from worker_client import Client

from baton.actors.build import build_engine
from baton.actors.config import WorkerConfig
from baton.actors.engine.config import EngineConfig
from baton.actors.engine.engine import Engine
from baton.actors.engine.errors import RankLost
from baton.actors.engine.request import Request, SamplingParams
from baton.actors.messages import Submit
from baton.actors.ranks import RankProcesses
from baton.actors.worker import Worker

SOON_S = 8.0  # far below every timeout of a collective


MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


@pytest.fixture
def config(tmp_path: Path) -> WorkerConfig:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return WorkerConfig(
        model=str(tmp_path),
        served_name="tiny",
        load_format="dummy",
        device="cpu",
        num_threads=1,
        tensor_parallel=2,
        engine=EngineConfig(num_blocks=512, max_num_seqs=4),
    )


def long_request(id: str) -> Request:
    return Request(id=id, tokens=(3, 4, 5), sampling=SamplingParams(max_tokens=4000, seed=0, ignore_eos=True))


def rank_processes(pid: int | None = None) -> list[psutil.Process]:
    """The other ranks of this process, or of the process `pid`."""
    children = psutil.Process(pid).children()
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]


@contextmanager
def soon() -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < SOON_S


def step_on(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_rank_fails_the_next_step(config: WorkerConfig, how: signal.Signals) -> None:
    built = build_engine(config)
    built.engine.submit(long_request("r"))
    for _ in range(5):
        built.engine.step()
    [rank] = rank_processes()
    with soon(), pytest.raises(RankLost, match=rf"rank 1 of this worker ended with exit code -{how.value};"):
        rank.send_signal(how)
        step_on(built.engine)
    built.ranks.close()


def test_closing_ends_every_rank(config: WorkerConfig) -> None:
    built = build_engine(config)
    ranks = rank_processes()
    assert len(ranks) == 1
    built.engine.submit(long_request("r"))
    built.engine.step()
    with soon():
        built.ranks.close()
        built.ranks.close()
    assert not rank_processes()
    assert not multiprocessing.active_children()


async def test_a_killed_rank_fails_the_worker_and_its_clients_hear_of_it(config: WorkerConfig) -> None:
    worker = Worker(worker_id="w", role="both", config=config)
    info = await worker.start()
    try:
        async with Client(info.peer.address) as client:
            client.send(Submit(long_request("r")))
            outputs = client.outputs()
            await anext(outputs)
            os.kill(rank_processes()[0].pid, signal.SIGKILL)
            async with asyncio.timeout(SOON_S):
                last = await anext(output async for output in outputs if output.finish is not None)
    finally:
        await worker.stop()
    assert last.finish == "error" and last.error == "worker w failed: RankLost"
    assert isinstance(worker.failed.exception(), RankLost)


async def test_a_rank_that_ends_while_nothing_runs_fails_the_worker(config: WorkerConfig) -> None:
    worker = Worker(worker_id="w", role="both", config=config)
    await worker.start()
    try:
        os.kill(rank_processes()[0].pid, signal.SIGKILL)
        with pytest.raises(RankLost, match="exit code -9"):
            await asyncio.wait_for(worker.failed, SOON_S)
    finally:
        await worker.stop()


LEADER = """
import sys
from baton.actors.build import build_engine
from baton.actors.config import WorkerConfig

if __name__ == "__main__":
    built = build_engine(WorkerConfig.model_validate_json(sys.argv[1]))
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_no_rank_outlives_a_killed_worker(config: WorkerConfig, tmp_path: Path) -> None:
    script = tmp_path / "leader.py"
    script.write_text(LEADER)
    command = [sys.executable, str(script), config.model_dump_json()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdout is not None
        assert leader.stdout.readline() == "ready\n"
        ranks = rank_processes(leader.pid)
        assert len(ranks) == 1
        ranks[0].suspend()  # it cannot see its line end: the kernel must end it
        leader.kill()
    _, alive = psutil.wait_procs(ranks, timeout=SOON_S)
    assert not alive


def test_a_rank_that_ends_before_it_takes_its_seat_fails_the_start(config: WorkerConfig) -> None:
    with pytest.raises(RankLost, match="rank 1 of this worker ended during its start"):
        RankProcesses(config, torch.device("cpu"), ends_at_once)
    assert not rank_processes()


def test_a_rank_that_ends_while_it_loads_fails_the_start(config: WorkerConfig) -> None:
    ranks = RankProcesses(config, torch.device("cpu"), ends_after_meeting)
    with soon(), pytest.raises(RankLost, match="rank 1"):
        ranks.agree(7)
    ranks.close()
    assert not rank_processes()
