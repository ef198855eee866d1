"""`baton chat`: a conversation in the terminal with a running server, and the one-line account of each answer."""

from __future__ import annotations

import asyncio
import sys
from typing import TextIO

import httpx
from rich.console import Console

from baton.cluster.chat_client import TIMEOUT, Answer, ChatClient, ChatMessage
from baton.cluster.errors import RequestFailedError

console = Console(highlight=False)


def account(answer: Answer) -> str:
    """Say who served the answer, what was moved for it and where the time to its first token went."""
    served = answer.trace.served[0]
    tokens = f"{answer.usage.completion_tokens} tokens in {answer.trace.e2e_s:.2f} s"
    if served is None:
        return tokens
    times = served.times
    phases = (
        f"queue {times.queue_s * 1e3:.0f}, prefill {times.prefill_s * 1e3:.0f}, "
        f"hand-over {times.handover_s * 1e3:.0f}, first step {times.first_step_s * 1e3:.0f}"
    )
    moved = (
        f"{served.blocks_moved} blocks ({served.bytes_moved / 1e6:.2f} MB) over {served.mover}"
        if served.blocks_moved
        else "nothing moved"
    )
    return (
        f"prefill {served.prefill_worker} → decode {served.decode_worker} · {moved} · "
        f"TTFT {answer.trace.ttft_s * 1e3:.0f} ms ({phases}) · {tokens}"
    )


class Conversation:
    """The turns so far. Each answer joins the history that the next question is asked with."""

    def __init__(
        self, client: ChatClient, model: str, *, max_tokens: int, temperature: float, output: TextIO = sys.stdout
    ) -> None:
        self._client = client
        self._model = model
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._output = output
        self._messages: list[ChatMessage] = []

    async def ask(self, question: str) -> Answer:
        """Print the answer as it streams; a failed turn leaves the history as it was."""
        messages: list[ChatMessage] = [*self._messages, {"role": "user", "content": question}]
        answer = await self._client.ask(
            self._model,
            messages,
            max_tokens=self._max_tokens,
            temperature=self._temperature,
            on_text=self._show,
        )
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        return answer

    def _show(self, text: str) -> None:
        """Print a piece of an answer as it is: no markup, no wrapping, at once."""
        self._output.write(text)
        self._output.flush()

    async def talk(self) -> None:
        """Take questions until the end of input."""
        while question := await read_line("> "):
            if not question.strip():
                continue
            try:
                answer = await self.ask(question.strip())
            except RequestFailedError as error:
                console.print(f"\n{error}", style="red", markup=False)
            else:
                console.print(f"\n[dim]{account(answer)}[/dim]")


async def read_line(prompt: str) -> str:
    """Read one line of standard input, "" at its end. On a terminal the event loop goes on meanwhile."""
    if not sys.stdin.isatty():
        return sys.stdin.readline()
    console.print(f"[bold]{prompt}[/bold]", end="")
    loop = asyncio.get_running_loop()
    typed = asyncio.Event()
    loop.add_reader(sys.stdin, typed.set)  # a terminal hands over whole lines, so that readline will not block
    try:
        await typed.wait()
    finally:
        loop.remove_reader(sys.stdin)
    return sys.stdin.readline()


async def run_chat(url: str, *, max_tokens: int, temperature: float) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT) as http:
        client = ChatClient(http)
        model = await client.model()
        console.print(f"[dim]{model} at {url}; Ctrl-D ends[/dim]")
        await Conversation(client, model, max_tokens=max_tokens, temperature=temperature).talk()
