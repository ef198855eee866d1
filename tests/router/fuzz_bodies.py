"""Bodies that are nearly right: valid ones of every endpoint, mutated as JSON and as bytes."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from hypothesis import strategies as st

from tests.router.rig import MODEL

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
SAMPLING = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "n": 2, "seed": 3, "stop": ["x"], "min_tokens": 1,
    "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1, "logit_bias": {"5": 1},
    "stop_token_ids": [7], "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    "cache_salt": "s", "priority": 1, "user": "u", "metadata": {"k": "v"},
}  # fmt: skip
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
BASES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        CHAT,
        CHAT | SAMPLING | {"logprobs": True, "top_logprobs": 2},
        CHAT | {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "auto"},
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": "n"}]},
    ],
    "/v1/completions": [
        {"prompt": "hi", "max_tokens": 3},
        {"prompt": [[5, 6], [7]], "max_tokens": 0, "echo": True, "logprobs": 1} | SAMPLING,
        {"prompt": ["a", "b"], "best_of": 1, "suffix": None},
    ],
    "/v1/embeddings": [
        {"input": ["a", "b"], "encoding_format": "float"},
        {"input": [1, 2], "pooling": "mean", "priority": 1},
    ],
    "/v1/responses": [
        {"input": "hi", "max_output_tokens": 3, "instructions": "i", "stream": True},
        {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
            "tools": [{"type": "function"} | TOOL],
            "text": {"format": {"type": "text"}},
            "tool_choice": {"type": "function", "name": "f"},
            "priority": 1,
        },
    ],
    "/v1/messages": [
        {"max_tokens": 3, "messages": [{"role": "user", "content": "hi"}], "stream": True, "system": "s"},
        {"max_tokens": 3, "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "top_k": 3},
        {
            "max_tokens": 3,
            "messages": [
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "2"}]},
            ],
            "tools": [{"name": "f", "input_schema": TOOL["parameters"]}],
            "tool_choice": {"type": "any"},
            "seed": 1,
            "priority": 1,
        },
    ],
    "/tokenize": [{"prompt": "a"}, {"messages": [{"role": "user", "content": "hi"}]}],
    "/detokenize": [{"tokens": [1, 2, 3]}],
}


class Fuzzed(NamedTuple):
    path: str
    body: bytes


_EDGES = st.sampled_from([
    None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 1e308, -0.0, 1e-300, float("nan"), float("inf"), "", "\x00",
    "\ud800", "a" * 300, "<|im_end|>", [], {}, [[]], [None], {"": {}}, "NaN", 10**40,
])  # fmt: skip
_JUNK = st.recursive(
    _EDGES | st.text(max_size=20) | st.integers() | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def fuzzed(draw: st.DrawFn) -> Fuzzed:
    path = draw(st.sampled_from(sorted(BASES)))
    body: Any = json.loads(json.dumps({"model": MODEL, **draw(st.sampled_from(BASES[path]))}))
    for _ in range(draw(st.integers(0, 3))):
        body = _mutated(draw, body)
    data = json.dumps(body).encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 4)) == 0:
        data = _bytes_mutated(draw, data)
    return Fuzzed(path, data)


def _mutated(draw: st.DrawFn, value: Any) -> Any:
    """Change one place in the tree."""
    if isinstance(value, dict) and value and draw(st.integers(0, 3)):
        key = draw(st.sampled_from(sorted(value)))
        match draw(st.integers(0, 3)):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return value | {draw(st.text(max_size=10)): value[key]}
            case _:
                return value | {key: _mutated(draw, value[key])}
    if isinstance(value, list) and value and draw(st.integers(0, 3)):
        index = draw(st.integers(0, len(value) - 1))
        if draw(st.booleans()):
            return value + [value[index]] * draw(st.integers(1, 40))
        return [*value[:index], _mutated(draw, value[index]), *value[index + 1 :]]
    return draw(_JUNK)


def _bytes_mutated(draw: st.DrawFn, data: bytes) -> bytes:
    at = draw(st.integers(0, len(data)))
    match draw(st.integers(0, 2)):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + draw(st.binary(max_size=8)) + data[at:]
        case _:
            return data[:at] + draw(st.binary(min_size=1, max_size=3)) + data[at + 3 :]
