"""Transcripts of tool calls in every dialect: the parts are the same for every cut, and say what was called."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.router.parts import CallStart, PartParser, join_parts
from baton.router.reasoning import Thinking, ThinkParser, thinking_after
from baton.router.tools.registry import DIALECTS, find_dialect

DATA = Path(__file__).parents[2] / "data" / "bfcl_parallel.jsonl"
Calls = list[tuple[str, Any]]
TWO: Calls = [("add_numbers", {"b": 2, "a": 2}), ("get_weather", {"location": 'To}"k\\yo 東京'})]


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def hermes(calls: Calls) -> str:
    texts = [f'<tool_call>\n{{"name": "{name}", "arguments": {dump(a)}}}\n</tool_call>' for name, a in calls]
    return "\n".join(texts)


def llama3(calls: Calls) -> str:
    return "; ".join(f'{{"name": "{name}", "parameters": {dump(arguments)}}}' for name, arguments in calls)


def mistral(calls: Calls) -> str:
    return "[TOOL_CALLS]" + dump([{"name": name, "arguments": arguments} for name, arguments in calls])


def pythonic(calls: Calls) -> str:
    texts = (f"{name}({', '.join(f'{key}={value!r}' for key, value in a.items())})" for name, a in calls)
    return f"[{', '.join(texts)}]"


SPELLINGS: dict[str, Callable[[Calls], str]] = {
    "hermes": hermes, "llama3": llama3, "mistral": mistral, "pythonic": pythonic,
}  # fmt: skip


def read(parser: PartParser, text: str, size: int) -> tuple[str, str, Calls]:
    parts = [part for start in range(0, len(text), size) for part in parser.push(text[start : start + size])]
    parts += parser.finish()
    starts = [part for part in parts if isinstance(part, CallStart)]
    assert [start.index for start in starts] == list(range(len(starts)))
    assert len({start.id for start in starts}) == len(starts)
    answer = join_parts(parts)
    return answer.content, answer.reasoning, [(call.name, json.loads(call.arguments)) for call in answer.calls]


def check(make: Callable[[], PartParser], text: str, expected: tuple[str, str, Calls]) -> None:
    for size in (*range(1, len(text)), 1_000_000):
        assert read(make(), text, size) == expected, size


@pytest.mark.parametrize("name", DIALECTS)
def test_two_calls_are_told_apart_for_every_cut(name: str) -> None:
    check(lambda: DIALECTS[name]().parser(forced=False), SPELLINGS[name](TWO), ("", "", TWO))


@pytest.mark.parametrize("name", DIALECTS)
def test_real_calls_survive_every_cut(name: str) -> None:
    for line in DATA.read_text().splitlines():
        calls = [
            (called, {key: values[0] for key, values in arguments.items()})
            for call in json.loads(line)["calls"]
            for called, arguments in call.items()
        ]
        check(lambda: DIALECTS[name]().parser(forced=False), SPELLINGS[name](calls), ("", "", calls))


@pytest.mark.parametrize("name", ["mistral", "pythonic"])
def test_a_forced_list_of_calls_is_read(name: str) -> None:
    check(lambda: DIALECTS[name]().parser(forced=True), mistral(TWO).removeprefix("[TOOL_CALLS]"), ("", "", TWO))


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", f"Let me see. {hermes(TWO)}\n done", "Let me see. \n done", TWO),
        ("hermes", f"{hermes(TWO)}\n", "", TWO),
        ("hermes", '<tool_call>{"a": 1}</tool_call>', '{"a": 1}', []),
        ("hermes", "a <tool_ca", "a <tool_ca", []),
        ("hermes", '<tool_call>{"arguments": {"a": [1]}, "name": "f"}</tool_call>', "", [("f", {"a": [1]})]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
        ("llama3", '{"answer": 3} is it', '{"answer": 3} is it', []),
        ("llama3", "plain {text}", "plain {text}", []),
        ("mistral", f"Well. {mistral(TWO)}", "Well. ", TWO),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "}"}[TOOL_CALLS]g{"b": 1}', "", [("f", {"a": "}"}), ("g", {"b": 1})]),
        ("mistral", "[TOOL", "[TOOL", []),
        ("pythonic", "[1, 2]", "[1, 2]", []),
        ("pythonic", "[f(__import__('os').system('x'))]", "[f(__import__('os').system('x'))]", []),
        ("pythonic", "no calls", "no calls", []),
        ("pythonic", "[f(a={'b': [1, None]}), g.h()]", "", [("f", {"a": {"b": [1, None]}}), ("g.h", {})]),
    ],
)
def test_text_around_calls_is_kept(name: str, text: str, content: str, calls: Calls) -> None:
    check(lambda: DIALECTS[name]().parser(forced=False), text, (content, "", calls))


@pytest.mark.parametrize(
    ("thinking", "text", "content", "reasoning"),
    [
        (Thinking.OPEN, "\nso <b> it is\n</think>\n\nYes.", "Yes.", "so <b> it is\n"),
        (Thinking.MAY_OPEN, "<think>\nso\n</think>\n\nYes.", "Yes.", "so\n"),
        (Thinking.MAY_OPEN, "Yes </think>", "Yes </think>", ""),
        (Thinking.MAY_OPEN, "<thi", "<thi", ""),
        (Thinking.OPEN, "cut </thi", "", "cut </thi"),
        (Thinking.OPEN, "</think>Yes.", "Yes.", ""),
    ],
)
def test_thoughts_are_told_from_the_answer(thinking: Thinking, text: str, content: str, reasoning: str) -> None:
    def make() -> PartParser:
        return ThinkParser(thinking, DIALECTS["hermes"]().parser(forced=False))

    check(make, text, (content, reasoning, []))
    if text.endswith("."):
        check(make, text + hermes(TWO), (content, reasoning, TWO))


def test_the_template_tells_the_dialect_and_whether_the_model_thinks() -> None:
    templates = {
        "{% if tools %}<tool_call>": "Hermes",
        "{% if tools %}[TOOL_CALLS]": "Mistral",
        '{% if tools %}{"name": ..., "parameters": ...}<|python_tag|>': "Llama3",
        "{% if tools %}[func_name1(params)]": "Pythonic",
        "{{ messages }}": "Hermes",
    }
    for template, name in templates.items():
        assert type(find_dialect("auto", template)).__name__ == name
    assert type(find_dialect("pythonic", "")).__name__ == "Pythonic"
    assert thinking_after("<think>\n", "...</think>...") is Thinking.OPEN
    assert thinking_after("<think>\n\n</think>\n\n", "...</think>...") is Thinking.NONE
    assert thinking_after("assistant\n", "...</think>...") is Thinking.MAY_OPEN
    assert thinking_after("<think>\n", "no thoughts") is Thinking.NONE
