from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from baton.cluster.bench.client import Client, Outcome, ServerError, find_model
from baton.cluster.bench.load import Job
from baton.cluster.bench.run import run_closed, run_open

JOB = Job(0.0, (1, 2, 3), 4)


def event(**fields: object) -> str:
    return f"data: {json.dumps({'choices': [], **fields})}\n\n"


def text(value: str) -> str:
    return event(choices=[{"index": 0, "text": value}])


USAGE = event(usage={"completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2}})
DONE = "data: [DONE]\n\n"


@asynccontextmanager
async def server(
    *parts: str, status: str = "200 OK", headers: str = "", pause_s: float = 0.0
) -> AsyncGenerator[tuple[str, list[bytes]], None]:
    """Answer each connection's one request with `parts`, `pause_s` apart, and close."""
    bodies: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line[:15].lower() == b"content-length:"), 0
        )
        bodies.append(await reader.readexactly(length))
        writer.write(f"HTTP/1.1 {status}\r\nconnection: close\r\n{headers}\r\n".encode())
        for part in parts:
            writer.write(part.encode())
            await writer.drain()
            await asyncio.sleep(pause_s)
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listener:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", bodies


async def ask(url: str) -> Outcome:
    client = Client(url, "m", {"authorization": "Bearer k"}, timeout_s=5.0)
    try:
        return await client.send(JOB, time.monotonic())
    finally:
        await client.close()


async def test_an_answer_in_full_is_timed_and_counted_by_the_servers_own_usage() -> None:
    async with server(text(""), text("a"), text("bcd"), USAGE, DONE, pause_s=0.02) as (url, bodies):
        outcome = await ask(url)
    assert (outcome.fate, outcome.num_tokens, outcome.cached_tokens) == ("ok", 7, 2)
    assert outcome.ttft_s is not None and outcome.ttft_s >= 0.02  # the event without text is no token
    assert outcome.itl_s is not None and outcome.itl_s == pytest.approx(outcome.gaps[0] / 6)
    body = json.loads(bodies[0])
    assert (body["prompt"], body["max_tokens"], body["ignore_eos"], body["stream"]) == ([1, 2, 3], 4, True, True)


async def test_events_may_be_cut_anywhere() -> None:
    whole = text("a") + text("b") + USAGE + DONE
    async with server(*(whole[i : i + 7] for i in range(0, len(whole), 7)), pause_s=0.001) as (url, _):
        outcome = await ask(url)
    assert (outcome.fate, outcome.num_tokens) == ("ok", 7)


async def test_a_refusal_is_told_from_a_failure() -> None:
    body = json.dumps({"error": {"message": "full"}})
    async with server(body, status="429 Too Many Requests", headers="retry-after: 3\r\n") as (url, _):
        outcome = await ask(url)
    assert (outcome.fate, outcome.error, outcome.retry_after_s) == ("refused", "full", 3.0)
    async with server("oops", status="500 Internal Server Error") as (url, _):
        outcome = await ask(url)
    assert (outcome.fate, outcome.error) == ("failed", "oops")


async def test_a_stream_that_breaks_off_or_tells_an_error_has_failed() -> None:
    async with server(text("a"), USAGE) as (url, _):
        assert (await ask(url)).error == "the stream ended without [DONE]"
    async with server(text("a"), event(error={"message": "lost"})) as (url, _):
        outcome = await ask(url)
        assert outcome.fate == "failed" and "lost" in outcome.error
    assert "ConnectError" in (await ask(url)).error  # nobody listens there any more


async def test_without_a_model_the_server_is_asked_for_one() -> None:
    async with server(json.dumps({"data": [{"id": "m"}]})) as (url, _):
        assert await find_model(url, {}) == "m"
    async with server("[]") as (url, _):
        with pytest.raises(ServerError, match="names no model"):
            await find_model(url, {})


class SlowClient(Client):
    """Holds up the whole process with its first request, as a client that cannot keep up does."""

    def __init__(self) -> None:
        self.running = self.most = 0

    async def send(self, job: Job, intended: float) -> Outcome:
        outcome = Outcome(intended, time.monotonic(), 1)
        self.running += 1
        self.most = max(self.most, self.running)
        if job.time_s == 0.0:
            time.sleep(0.1)
        await asyncio.sleep(0.001)
        self.running -= 1
        outcome.ended = time.monotonic()
        return outcome


async def test_open_loop_latencies_count_from_the_intended_time() -> None:
    jobs = [Job(i * 0.01, (1,), 1) for i in range(10)]
    outcomes = await run_open(SlowClient(), jobs, lambda outcome: None)
    gaps = [later.intended - earlier.intended for earlier, later in itertools.pairwise(outcomes)]
    assert gaps == pytest.approx([0.01] * 9)
    assert outcomes[1].sent - outcomes[1].intended > 0.05  # it could not be sent in time, and that is told


async def test_closed_loop_keeps_as_many_going_as_it_was_told() -> None:
    client = SlowClient()
    outcomes = await run_closed(client, [Job(1.0, (1,), 1)] * 20, lambda outcome: None, 3)
    assert (len(outcomes), client.most) == (20, 3)
