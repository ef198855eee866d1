"""How a chat's output is to be constrained and understood: tools, thinking and structured output together."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from baton.router.errors import InvalidRequest
from baton.router.openai_models import ChatRequest, CompletionRequest
from baton.router.parts import PartParser, PlainText
from baton.router.reasoning import Thinking, ThinkParser, thinking_grammar
from baton.router.structured.constraint import asked_format, lower
from baton.router.tool_models import FunctionTool, NamedToolChoice
from baton.router.tools.dialect import Dialect, Format, Tool


@dataclass(frozen=True, slots=True)
class Speech:
    grammar: str = ""  # of the request
    make_parser: Callable[[], PartParser] = PlainText  # one for each choice
    markers: tuple[str, ...] = ()  # control tokens that the parser must see


def completion_speech(body: CompletionRequest) -> Speech:
    return Speech(_text(asked_format(body.response_format, body.structured_outputs), body))


def chat_speech(body: ChatRequest, dialect: Dialect, thinking: Thinking) -> Speech:
    """Raises InvalidRequest for what cannot be asked together."""
    answer = asked_format(body.response_format, body.structured_outputs)
    tools = offered_tools(body)
    make_answer: Callable[[], PartParser] = PlainText
    markers: tuple[str, ...] = ()
    if tools:
        if answer is not None:
            raise InvalidRequest(
                "tools and a format for the answer cannot be asked together: drop one, or set tool_choice to none",
                param="response_format",
            )
        forced = body.tool_choice not in (None, "auto")
        answer = _tool_grammar(body, dialect, tools, forced=forced)
        make_answer = partial(dialect.parser, forced=forced)
        markers = dialect.markers
    if body.thinking_budget is not None and thinking is Thinking.NONE:
        raise InvalidRequest("thinking_budget needs a model that thinks, and is told to", param="thinking_budget")
    make_parser = make_answer
    if thinking is not Thinking.NONE:
        make_parser = lambda: ThinkParser(thinking, make_answer())  # noqa: E731
    return Speech(_text(thinking_grammar(thinking, body.thinking_budget, answer), body), make_parser, markers)


def offered_tools(body: ChatRequest) -> Sequence[FunctionTool]:
    """The tools that the model may call. Raises InvalidRequest."""
    tools = body.tools or []
    choice = body.tool_choice
    if isinstance(choice, NamedToolChoice):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    if not tools and choice not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice asks for a call of a tool that tools does not have", param="tool_choice")
    return [] if choice == "none" else tools


def _tool_grammar(body: ChatRequest, dialect: Dialect, tools: Sequence[FunctionTool], *, forced: bool) -> Format | None:
    """Constrain calls that must be made, that a tool is strict about, or that may not be parallel."""
    parallel = body.parallel_tool_calls is not False and not isinstance(body.tool_choice, NamedToolChoice)
    is_strict = any(tool.function.strict for tool in tools)
    if not (forced or is_strict or body.parallel_tool_calls is False):
        return None
    specs = [Tool(tool.function.name, _parameters(i, tool, forced=forced)) for i, tool in enumerate(tools)]
    return dialect.grammar(specs, forced=forced, parallel=parallel)


def _parameters(index: int, tool: FunctionTool, *, forced: bool) -> dict[str, Any] | bool:
    """Lower a tool's schema; one that says nothing of strictness may be too much for a grammar, and is then dropped."""
    function = tool.function
    schema = function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
    try:
        return lower(schema, f"tools.{index}.function.parameters")
    except InvalidRequest:
        if function.strict:
            raise
        return {"type": "object", "additionalProperties": True}


def _text(format: Format | None, body: ChatRequest | CompletionRequest) -> str:
    if format is None:
        return ""
    for field in ("min_tokens", "ignore_eos"):
        if getattr(body, field):
            raise InvalidRequest(f"{field} cannot be kept together with a format for the output: drop it", param=field)
    return json.dumps({"type": "structural_tag", "format": format})
