"""What clients may send to ``POST /v1/responses``: a conversation as a list of items, and how to go on with it.

Nothing is stored between requests: the client sends all items each time.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from router.openai.schema import Body, ReasoningEffort, RefusalPart, part_kind
from router.openai.tools_schema import choice_kind
from workers.engine.errors import InvalidRequest

_STORED = "nothing is stored between requests: send all earlier items in input instead"


class InputText(Body):
    """A piece of an item's text, a caller's or an earlier answer's."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    """Accepted without effect, as an earlier answer has it; likewise the next."""
    logprobs: list[Any] | None = None


MessagePart = Annotated[
    Annotated[InputText, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")], Discriminator(part_kind)
]


def _text_kind(value: object) -> str:
    return "<many>" if isinstance(value, list) else "<one>"


class InputMessage(Body):
    """A message: a caller's, or an answer given back."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[str, Tag("<one>")] | Annotated[list[MessagePart], Field(fail_fast=True), Tag("<many>")],
        Discriminator(_text_kind),
    ]
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    @property
    def refuses(self) -> bool:
        """True if some of its text is a refusal."""
        return not isinstance(self.content, str) and any(isinstance(one, RefusalPart) for one in self.content)

    @property
    def text(self) -> str:
        """Content as one string; what kind of text a part says it is decides nothing."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ReasoningItem(Body):
    """An earlier answer's reasoning, given back; models are not shown it again."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[Any] | None = None
    content: list[Any] | None = None
    encrypted_content: str | None = None
    status: str | None = None


class FunctionCallItem(Body):
    """An earlier answer's call, given back."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    """JSON."""
    id: str | None = None
    status: str | None = None


class FunctionOutputItem(Body):
    """What a call came to."""

    type: Literal["function_call_output"]
    call_id: str
    output: Annotated[
        Annotated[str, Tag("<one>")] | Annotated[list[InputText], Field(fail_fast=True), Tag("<many>")],
        Discriminator(_text_kind),
    ]
    id: str | None = None
    status: str | None = None

    @property
    def text(self) -> str:
        """Output as one string."""
        return self.output if isinstance(self.output, str) else "".join(part.text for part in self.output)


def _item_kind(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return {
        "reasoning": "<reasoning>", "function_call": "<call>", "function_call_output": "<output>",
    }.get(kind if isinstance(kind, str) else "", "<message>")  # fmt: skip


InputItem = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[FunctionCallItem, Tag("<call>")]
    | Annotated[FunctionOutputItem, Tag("<output>")],
    Discriminator(_item_kind),
]


class FunctionTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: str = Field(pattern=r"^[A-Za-z0-9_.\-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(Body):
    """A choice of one function."""

    type: Literal["function"]
    name: str


class AllowedChoice(Body):
    """A choice among some of the functions."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[FunctionChoice] = Field(min_length=1, fail_fast=True)


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[FunctionChoice, Tag("<named>")]
    | Annotated[AllowedChoice, Tag("<allowed>")],
    Discriminator(choice_kind),
]


class PlainFormat(Body):
    """Text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(Body):
    """JSON that a schema allows."""

    type: Literal["json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """Accepted without effect: schemas are enforced always."""


def _format_kind(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<schema>" if kind == "json_schema" else "<plain>"


TextFormat = Annotated[
    Annotated[PlainFormat, Tag("<plain>")] | Annotated[SchemaFormat, Tag("<schema>")],
    Discriminator(_format_kind),
]


class ReasoningOptions(Body):
    """How the model thinks."""

    effort: ReasoningEffort | None = None
    """Given to the template, as ``reasoning_effort``."""
    summary: str | None = None
    """Accepted without effect: thinking is shown as it is."""
    generate_summary: str | None = None


class TextOptions(Body):
    """How the answer is written."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Accepted without effect."""


class ResponsesStreamOptions(Body):
    """What a stream holds."""

    include_obfuscation: bool | None = None
    """Accepted without effect."""


LOGPROBS = "message.output_text.logprobs"
"""The word of ``include`` that asks for log-probabilities."""

Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""OpenAI's words."""


class ResponsesBody(Body):
    """Body of ``POST /v1/responses``; the fields after ``user`` change nothing here, or are refused."""

    model: str
    input: Annotated[
        Annotated[str, Field(min_length=1), Tag("<one>")]
        | Annotated[list[InputItem], Field(min_length=1, fail_fast=True), Tag("<many>")],
        Discriminator(_text_kind),
    ]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: int | None = Field(None, ge=0)
    include: list[Included] | None = Field(None, fail_fast=True)
    """ ``LOGPROBS`` asks for log-probabilities; of the others there is nothing that could be included."""
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """``auto`` drops the oldest messages of a conversation that is too long."""
    metadata: dict[str, str] | None = Field(None, max_length=16)
    """Comes back in the answer."""
    user: str | None = None
    store: bool | None = None
    """Accepted without effect: nothing is stored."""
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    reasoning: ReasoningOptions | None = None
    background: bool | None = None
    tools: list[FunctionTool] | None = Field(None, fail_fast=True)
    tool_choice: ToolChoice | None = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None

    @field_validator("previous_response_id", "conversation", "prompt")
    @classmethod
    def nothing_is_stored(cls, value: Any) -> Any:
        """Null only."""
        if value is not None:
            raise ValueError(_STORED)
        return None

    @model_validator(mode="after")
    def includes_what_it_counts(self) -> Self:
        """So many likeliest tokens are shown where log-probabilities are."""
        if self.top_logprobs and LOGPROBS not in (self.include or ()):
            raise InvalidRequest(f'top_logprobs: only shown with include: ["{LOGPROBS}"]', "top_logprobs")
        return self

    @field_validator("background")
    @classmethod
    def answers_at_once(cls, value: bool | None) -> bool | None:
        """False only: an answer that is not waited for would have to be stored."""
        if value:
            raise ValueError(_STORED)
        return value
