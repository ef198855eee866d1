from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest
from fake_workers import FakeWorker

from baton.router.api_keys import ApiKey, KeyedDoor, OpenDoor, make_door
from baton.router.config import RouterConfig
from baton.router.errors import RateLimited, Unauthorized
from baton.router.tokenizer import Tokenizer
from tests.router.rig import MODEL, served


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def key(text: str, **limits: Any) -> ApiKey:
    return ApiKey(name=f"of {text}", sha256=hashlib.sha256(text.encode()).hexdigest(), **limits)


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


@pytest.mark.parametrize("headers", [{}, {"authorization": "Basic a"}, bearer(""), bearer("b"), {"x-api-key": "b"}])
def test_without_a_known_key_nobody_enters(headers: dict[str, str]) -> None:
    with pytest.raises(Unauthorized) as refused:
        KeyedDoor([key("a")]).enter(headers)
    assert "b" not in refused.value.message.split()


@pytest.mark.parametrize("headers", [bearer("a"), {"authorization": "bearer  a "}, {"x-api-key": "a"}])
def test_a_key_may_come_by_either_header(headers: dict[str, str]) -> None:
    assert KeyedDoor([key("a")]).enter(headers).name == "of a"


def test_requests_a_minute_come_back_evenly() -> None:
    clock = Clock()
    door = KeyedDoor([key("a", requests_per_minute=6), key("b")], clock)
    for _ in range(6):
        door.enter(bearer("a")).leave(0)
    with pytest.raises(RateLimited) as refused:
        door.enter(bearer("a"))
    assert refused.value.retry_after_s == 10
    door.enter(bearer("b"))
    clock.now = 10
    door.enter(bearer("a"))
    with pytest.raises(RateLimited):
        door.enter(bearer("a"))


def test_tokens_used_late_leave_a_debt() -> None:
    clock = Clock()
    door = KeyedDoor([key("a", tokens_per_minute=60)], clock)
    door.enter(bearer("a")).leave(90)
    with pytest.raises(RateLimited) as refused:
        door.enter(bearer("a"))
    assert refused.value.retry_after_s == 31
    clock.now = 31
    door.enter(bearer("a"))


def test_only_so_many_at_once_and_leaving_twice_counts_once() -> None:
    door = KeyedDoor([key("a", max_concurrent=2)])
    first, _ = door.enter(bearer("a")), door.enter(bearer("a"))
    for _ in range(2):
        with pytest.raises(RateLimited):
            door.enter(bearer("a"))
        first.leave(0)
        first.leave(0)
        door.enter(bearer("a"))
        break
    with pytest.raises(RateLimited):
        door.enter(bearer("a"))


def test_keys_come_from_config_and_file(tmp_path: Path) -> None:
    assert isinstance(make_door((), None), OpenDoor)
    file = tmp_path / "keys.yaml"
    file.write_text(f"- name: from file\n  sha256: {hashlib.sha256(b'f').hexdigest()}\n  max_concurrent: 1\n")
    door = make_door((key("a"),), file)
    assert (door.enter(bearer("f")).name, door.enter(bearer("a")).name) == ("from file", "of a")


async def test_every_endpoint_but_the_probes_wants_the_key(tokenizer: Tokenizer) -> None:
    limited = key("secret", max_concurrent=1, tokens_per_minute=1_000_000)
    async with served(tokenizer, FakeWorker(step_s=0.001), config=RouterConfig(api_keys=(limited,))) as api:
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize"):
            reply = await api.http.post(path, json={"model": MODEL})
            assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
        assert (await api.http.get("/v1/models")).status_code == 401
        for path in ("/health", "/live", "/version", "/metrics", "/"):
            assert (await api.http.get(path)).status_code == 200
        api.http.headers.update(bearer("secret"))
        replies = await asyncio.gather(*(api.chat(max_tokens=20) for _ in range(3)))
        assert sorted(reply.status_code for reply in replies) == [200, 429, 429]
        assert (await api.chat(max_tokens=2)).status_code == 200  # the place came back
        assert len(await api.events(max_tokens=2)) == 5
        assert (await api.chat(max_tokens=2)).status_code == 200
