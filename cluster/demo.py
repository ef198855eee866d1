"""`baton demo`: one question to a small cluster made for it, and a chat where somebody can type."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import httpx
import msgspec

from baton.cluster.chat import Conversation, account, console
from baton.cluster.chat_client import TIMEOUT, Answer, ChatClient
from baton.cluster.config import ClusterConfig, load_config
from baton.cluster.errors import RequestFailedError
from baton.cluster.ray_launcher import RayLauncher
from baton.cluster.serve import messages, serving

DEFAULT_PROMPT = "What is the capital of France?"


def demo_config() -> ClusterConfig:
    # Beside this folder in a checkout and in an installed package alike; importlib.resources cannot read a namespace
    # package through setuptools' editable finder.
    return load_config(Path(__file__).parents[1] / "deploy" / "demo.yaml")


async def demo(prompt: str | None, *, max_tokens: int, as_json: bool) -> None:
    """Answer `prompt`, or the default question. With `as_json`, stdout gets exactly one JSON object."""
    config = demo_config()
    question = prompt or DEFAULT_PROMPT
    async with (
        serving(config, RayLauncher(config)) as address,
        httpx.AsyncClient(base_url=address, timeout=TIMEOUT) as http,
    ):
        conversation = Conversation(
            ChatClient(http),
            config.worker.served_name,
            max_tokens=max_tokens,
            temperature=0.0,
            output=sys.stderr if as_json else sys.stdout,
        )
        messages.print("[bold]>[/bold]", question, markup=True)
        answer = await conversation.ask(question)
        if as_json:
            print(json.dumps(report(answer)))
            return
        console.print(f"\n[dim]{account(answer)}[/dim]")
        if prompt is None and sys.stdin.isatty():
            await conversation.talk()


def report(answer: Answer) -> dict[str, object]:
    served = answer.trace.served[0]
    if served is None:
        raise RequestFailedError("the gateway did not say who served the request")
    return {
        "text": answer.text,
        "usage": msgspec.to_builtins(answer.usage),
        "prefill_worker": served.prefill_worker,
        "decode_worker": served.decode_worker,
        "blocks_moved": served.blocks_moved,
        "bytes_moved": served.bytes_moved,
        "mover": served.mover,
        "ttft_ms": {
            "total": answer.trace.ttft_s * 1e3,
            "queue": served.times.queue_s * 1e3,
            "prefill": served.times.prefill_s * 1e3,
            "handover": served.times.handover_s * 1e3,
            "first_step": served.times.first_step_s * 1e3,
        },
    }
