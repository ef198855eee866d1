"""Prompt files: JSON lines with a `prompt`, a `question`, a list of `turns` (the first is taken) or `messages`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        fields: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadPromptFile(f"{where} is not JSON: {error}") from error
    if "messages" in fields:
        return fields["messages"]
    for name in ("prompt", "question"):
        if isinstance(fields.get(name), str):
            return [{"role": "user", "content": fields[name]}]
    if fields.get("turns"):
        return [{"role": "user", "content": fields["turns"][0]}]
    raise BadPromptFile(f"{where} has no prompt, question, turns or messages; name one of them so")
