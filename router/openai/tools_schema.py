"""Tools and calls as bodies spell them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

MAX_TOOLS = 128
"""OpenAI's limit."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class FunctionSpec(_Strict):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.\-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(_Strict):
    """One of ``tools``."""

    type: Literal["function"]
    function: FunctionSpec


class FunctionName(_Strict):
    """A function, named."""

    name: str


class NamedTool(_Strict):
    """A choice of one function."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(_Strict):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1)


class AllowedToolsChoice(_Strict):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def choice_kind(value: object) -> str:
    """Tag of a ``tool_choice``: a word, a named tool, or a choice among some."""
    if isinstance(value, str):
        return "<word>"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<allowed>" if kind == "allowed_tools" else "<named>"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedTool, Tag("<named>")]
    | Annotated[AllowedToolsChoice, Tag("<allowed>")],
    Discriminator(choice_kind),
]


class CalledFunction(_Strict):
    """A call in an assistant's message, given back."""

    name: str
    arguments: str
    """JSON."""


class ToolCall(_Strict):
    """One of an assistant message's ``tool_calls``."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Accepted without effect, as a streamed call has it."""
