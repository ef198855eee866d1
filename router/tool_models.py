"""Tools and tool calls in OpenAI's request bodies."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_TOOLS = 128
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class Function(_Strict):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None


class FunctionTool(_Strict):
    type: Literal["function"]
    function: Function


class FunctionReference(_Strict):
    name: FunctionName


class NamedToolChoice(_Strict):
    type: Literal["function"]
    function: FunctionReference


class CalledFunction(_Strict):
    name: FunctionName
    arguments: str  # JSON text


class ToolCall(_Strict):
    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction


Tools = Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice
