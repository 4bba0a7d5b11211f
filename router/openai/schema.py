"""What clients may send, as pydantic models: strict, unknown fields refused, null the same as absent.

Accepted without effect: the fields of ``WithoutEffect``. Refused with a clear answer: everything that is
not written here, and what ``must_be_unset`` names.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from router.openai.structured import StructuredFields, said_as
from router.openai.tools_schema import ChatTool, ToolCall, ToolChoice
from workers.engine.errors import InvalidRequest
from workers.engine.request import MAX_LENGTH_PENALTY

_MAX_SEED = 2**64 - 1

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""OpenAI's words; ``chat_template_kwargs`` gives a template any other."""

Unset = Annotated[Any, Field(default=None, json_schema_extra={"description": "Not supported yet."})]


def input_kind(value: object) -> str:
    """Which form of a field is meant, so that an error speaks of that form alone."""
    if not isinstance(value, list):
        return "<one>"
    if not value:
        return "<many>"
    if isinstance(value[0], int | float):  # true and 1.5 are no token ids, and less are they texts
        return "<ids>"
    return "<id lists>" if isinstance(value[0], list) else "<many>"


def _one_or_many(value: object) -> str:
    return "<many>" if isinstance(value, list) else "<one>"


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class Body(_Strict):
    """Base of the bodies that are declared beside what answers them."""


class WithoutEffect(_Strict):
    """Fields of OpenAI's API that change nothing here and are accepted for compatibility."""

    user: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None
    prediction: Any = None
    """Speeds other servers up and changes no text."""
    verbosity: Literal["low", "medium", "high"] | None = None


class StreamOptions(_Strict):
    """What a stream holds besides text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Accepted without effect."""


class SamplingBody(WithoutEffect, StructuredFields):
    """Fields that both APIs share; those after ``stop`` are vLLM's additions to OpenAI's."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=4096)
    seed: int | None = Field(None, ge=-(2**63), le=_MAX_SEED)
    max_tokens: int | None = Field(None, ge=0)
    prompt_cache_key: str | None = None
    stop: (
        Annotated[
            Annotated[str, Tag("<one>")] | Annotated[list[str], Field(fail_fast=True), Tag("<many>")],
            Discriminator(_one_or_many),
        ]
        | None
    ) = None
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    min_tokens: int | None = Field(None, ge=0)
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = Field(None, max_length=1024, fail_fast=True)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    """Accepted without effect: text is the bytes of its tokens."""
    bad_words: list[str] | None = Field(None, max_length=256, fail_fast=True)
    """Texts that the output must not hold."""
    allowed_token_ids: list[Annotated[int, Field(ge=0)]] | None = Field(None, min_length=1, fail_fast=True)
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    """Keep only so many tokens of the prompt, the last ones; -1: as many as fit."""
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)
    """Lower is served first, where the engine's policy is priority."""
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    """Share cached prefixes with requests of the same salt alone."""
    best_of: int | None = Field(None, ge=1)
    """Choices to generate, of which the ``n`` with the highest mean log-probability of their tokens are given; of a
    beam search its width."""
    use_beam_search: bool | None = None
    """Search for the ``n`` likeliest outputs instead of sampling."""
    length_penalty: float | None = Field(None, ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)
    """Of a beam search, whose outputs are ranked by log-probability / length ** penalty. (default: 1)"""
    early_stopping: Annotated[bool | Literal["never"], said_as('must be true, false or "never"')] | None = (
        None
    )
    """Of a beam search: once enough outputs have ended, stop at once (true), when no beam is better at its present
    length (false), or when none can become better (``never``, the default)."""
    prompt_logprobs: int | None = Field(None, ge=0)
    """Log-probabilities of the prompt's own tokens, and of so many likeliest in place of each."""

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def must_keep_some(cls, value: int | None) -> int | None:
        """A prompt has a token at least."""
        if value == 0:
            raise ValueError("must be at least 1, or -1 for as many as fit")
        return value

    @property
    def stop_strings(self) -> list[str]:
        """``stop`` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def wants_usage_chunk(self) -> bool:
        """True if a stream ends with a chunk of token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)


class TextPart(_Strict):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class RefusalPart(_Strict):
    """A refusal among the parts of an assistant's message, given back."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """What was said."""
        return self.refusal


def part_kind(value: object) -> str:
    """Tag of a part of a message: a refusal, or text."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<refusal>" if kind == "refusal" else "<text>"


ContentPart = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")], Discriminator(part_kind)
]


class ChatMessage(_Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Annotated[
            Annotated[str, Tag("<one>")] | Annotated[list[ContentPart], Field(fail_fast=True), Tag("<many>")],
            Discriminator(_one_or_many),
        ]
        | None
    ) = None
    """May be missing only where an assistant calls tools or refuses."""
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """An earlier answer's thinking, given back; what is shown of it is the template's to say."""
    refusal: str | None = None
    """An earlier answer's, given back: text behind the content."""
    annotations: Unset
    audio: Unset
    function_call: Unset

    @field_validator("annotations", "audio", "function_call")
    @classmethod
    def must_be_unset(cls, value: Any) -> Any:
        """Null or empty, as the official client gives back an answer; anything else has no meaning here."""
        if value:
            raise ValueError("is not supported")
        return None

    @property
    def text(self) -> str:
        """Content and refusal as one string."""
        content = self.content or ""
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        return content + (self.refusal or "")

    @property
    def refuses(self) -> bool:
        """True if some of its text is a refusal."""
        parts = () if self.content is None or isinstance(self.content, str) else self.content
        return bool(self.refusal) or any(isinstance(part, RefusalPart) for part in parts)


class TemplateFields(_Strict):
    """Fields of a conversation's body that its chat template is shown, besides the messages."""

    tools: list[ChatTool] | None = Field(None, fail_fast=True)
    add_generation_prompt: bool | None = None
    """Let the assistant speak next. (default: true)"""
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None
    """Given to the template, as ``reasoning_effort``."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def names_no_field(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        """What a field of the body says cannot be said otherwise."""
        fields = ("messages", "tools", "add_generation_prompt", "continue_final_message")
        twice = next((name for name in fields if name in (value or ())), None)
        if twice is not None:
            raise ValueError(f"{twice!r} is a field of the body: give it there")
        return value

    @model_validator(mode="after")
    def says_its_effort_once(self) -> Self:
        """``reasoning_effort`` may stand in the template's own variables, where it may be any word."""
        told = (self.chat_template_kwargs or {}).get("reasoning_effort", self.reasoning_effort)
        if self.reasoning_effort is not None and told != self.reasoning_effort:
            raise InvalidRequest(
                f"reasoning_effort: is {self.reasoning_effort!r}, in chat_template_kwargs {str(told)[:20]!r}: "
                "give one of the two",
                "reasoning_effort",
            )
        return self


class ChatBody(SamplingBody, TemplateFields):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    modalities: list[Literal["text"]] | None = Field(None, fail_fast=True)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Unset
    function_call: Unset
    include_reasoning: bool | None = None
    """False: thinking is left out of the answer."""
    thinking_token_budget: int | None = Field(None, ge=0)
    """Tokens of thinking after which its end is forced."""

    @field_validator("functions", "function_call")
    @classmethod
    def must_be_unset(cls, value: Any) -> Any:
        """Null: OpenAI's own successor of these are tools."""
        if value is not None:
            raise ValueError("is not supported: use tools and tool_choice")
        return None

    @field_validator("max_tokens")
    @classmethod
    def at_least_one_token(cls, value: int | None) -> int | None:
        """A chat answer has a token at least."""
        if value == 0:
            raise ValueError("must be at least 1")
        return value


class CompletionBody(SamplingBody):
    """Body of ``POST /v1/completions``."""

    prompt: Annotated[
        Annotated[str, Tag("<one>")]
        | Annotated[list[str], Field(min_length=1, fail_fast=True), Tag("<many>")]
        | Annotated[list[int], Field(fail_fast=True), Tag("<ids>")]
        | Annotated[
            list[Annotated[list[int], Field(min_length=1, fail_fast=True)]],
            Field(fail_fast=True),
            Tag("<id lists>"),
        ],
        Discriminator(input_kind),
    ]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0)
    add_special_tokens: bool | None = None
    """What the tokenizer adds to a prompt that is text by itself. (default: true)"""
    suffix: Unset

    @field_validator("suffix")
    @classmethod
    def must_be_unset(cls, value: Any) -> Any:
        """Null or empty."""
        if value:
            raise ValueError("is not supported")
        return None

    @property
    def prompts(self) -> list[str | list[int]]:
        """All prompts, each text or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            return [prompt]  # type: ignore[list-item]
        return list(prompt)  # type: ignore[arg-type]
