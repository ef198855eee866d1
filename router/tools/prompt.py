"""Tools and calls in a conversation, as a chat template takes them; in plain words for a template that knows none."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

ChatMessage = Mapping[str, Any]

INSTRUCTIONS = """You may call functions. These are available, each described in JSON:
{tools}
To call one, answer with a JSON object between <tool_call> and </tool_call>, and nothing else:
<tool_call>
{{"name": "function name", "arguments": {{"argument": "value"}}}}
</tool_call>
The results come between <tool_response> and </tool_response>."""


def in_plain_words(messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """Write tools into the system message, calls and results into the text."""
    plain = [_plain_message(message) for message in messages]
    if not tools:
        return plain
    described = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    system = INSTRUCTIONS.format(tools=described)
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{system}"}, *plain[1:]]
    return [{"role": "system", "content": system}, *plain]


def _plain_message(message: ChatMessage) -> ChatMessage:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
    text = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    return {"role": "assistant", "content": f"{message['content']}\n{text}".strip()}
