from __future__ import annotations

import io
import json
from typing import Any

import httpx
import pytest
from test_chat_client import LAST, client, piece, stream

from baton.actors.messages import PhaseTimes, ServedBy
from baton.cluster.chat import Conversation, account
from baton.cluster.chat_client import Answer, Trace, Usage
from baton.cluster.demo import report
from baton.cluster.errors import RequestFailedError

SERVED = ServedBy(
    decode_worker="decode-0",
    prefill_worker="prefill-0",
    mover="nixl",
    blocks_moved=3,
    bytes_moved=1_105_920,
    times=PhaseTimes(queue_s=0.001, prefill_s=0.2, handover_s=0.03, first_step_s=0.04),
)


def answer(served: ServedBy | None) -> Answer:
    usage = Usage(prompt_tokens=37, completion_tokens=8, total_tokens=45)
    return Answer("Paris.", usage, Trace(ttft_s=0.25, e2e_s=0.9, served=[served]))


def test_the_account_of_an_answer_says_who_served_it_what_moved_and_where_the_time_went() -> None:
    assert account(answer(SERVED)) == (
        "prefill prefill-0 → decode decode-0 · 3 blocks (1.11 MB) over nixl · "
        "TTFT 250 ms (queue 1, prefill 200, hand-over 30, first step 40) · 8 tokens in 0.90 s"
    )


def test_the_account_does_not_claim_a_transfer_that_was_none() -> None:
    assert "nothing moved" in account(answer(ServedBy(decode_worker="both-0", prefill_worker="both-0")))


def test_the_demos_report_holds_every_promised_key() -> None:
    assert report(answer(SERVED)) == {
        "text": "Paris.",
        "usage": {"prompt_tokens": 37, "completion_tokens": 8, "total_tokens": 45},
        "prefill_worker": "prefill-0",
        "decode_worker": "decode-0",
        "blocks_moved": 3,
        "bytes_moved": 1_105_920,
        "mover": "nixl",
        "ttft_ms": {"total": 250.0, "queue": 1.0, "prefill": 200.0, "handover": 30.0, "first_step": 40.0},
    }


def test_a_report_without_a_server_is_an_error() -> None:
    with pytest.raises(RequestFailedError):
        report(answer(None))


async def test_a_conversation_sends_its_history_and_a_failed_turn_leaves_no_trace_in_it() -> None:
    asked: list[Any] = []
    replies = iter([stream(piece("One"), LAST), stream({"error": {"message": "broken"}}), stream(piece("Two"), LAST)])

    def serve(request: httpx.Request) -> httpx.Response:
        asked.append([message["content"] for message in json.loads(request.content)["messages"]])
        return httpx.Response(200, text=next(replies))

    output = io.StringIO()
    conversation = Conversation(client(serve), "m", max_tokens=5, temperature=0.0, output=output)
    await conversation.ask("1?")
    with pytest.raises(RequestFailedError):
        await conversation.ask("lost?")
    await conversation.ask("2?")
    assert asked == [["1?"], ["1?", "One", "lost?"], ["1?", "One", "2?"]]
    assert output.getvalue() == "OneTwo"
