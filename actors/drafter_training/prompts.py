"""Prompt files: JSON lines with a `prompt`, a `question`, a list of `turns` (the first is taken) or `messages`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

Messages = list[dict[str, str]]


class BadPromptFile(ValueError):
    """A line is not JSON, or has none of the fields that hold a prompt. Names the file and the line."""


@dataclass(frozen=True, slots=True)
class Split:
    train: list[Messages]
    held_out: list[Messages]


def read_prompts(path: Path) -> list[Messages]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [_messages(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]


def split_prompts(paths: Sequence[Path], hold_every: int) -> Split:
    """Keep every `hold_every`-th prompt of each file out of training."""
    split = Split([], [])
    for path in paths:
        for index, messages in enumerate(read_prompts(path)):
            (split.held_out if index % hold_every == hold_every - 1 else split.train).append(messages)
    return split


def _messages(line: str, where: str) -> Messages:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadPromptFile(f"{where} is not JSON: {error}") from error
    fields: dict[str, Any] = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    messages: Any = fields.get("messages")
    if messages is None:
        turns = fields.get("turns") or [None]
        messages = [{"role": "user", "content": fields.get("prompt") or fields.get("question") or turns[0]}]
    if not all(isinstance(message.get(name), str) for message in messages for name in ("role", "content")):
        raise BadPromptFile(f"{where} has no text in prompt, question, turns or messages; name one of them so")
    return messages
