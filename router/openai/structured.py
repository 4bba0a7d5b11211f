"""Which grammar a body asks for: OpenAI's ``response_format``, and vLLM's ``structured_outputs`` and ``guided_...``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import orjson
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from router.text.grammars import (
    WHITESPACE,
    Schema,
    WantedGrammar,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    regex_grammar,
    structural_tag_grammar,
    text_grammar,
)
from workers.engine.errors import InvalidRequest

MAX_GRAMMAR_CHARS = 1 << 20
"""Of a schema or grammar as compiled; larger ones are refused unread."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", populate_by_name=True)


def said_as(words: str) -> WrapValidator:
    """An error in our words, where a field has several types and pydantic would name each."""

    def check(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(words) from None

    return WrapValidator(check)


_SchemaObject = Annotated[
    dict[str, Any] | bool, said_as("must be a JSON schema: an object, or true or false")
]
_SpelledSchema = Annotated[
    dict[str, Any] | bool | str, said_as("must be a JSON schema: an object, true or false, or its text")
]


class JsonSchema(_Strict):
    """A named schema."""

    name: str = ""
    description: str | None = None
    schema_: _SchemaObject | None = Field(None, alias="schema")
    strict: bool | None = None
    """Accepted without effect: schemas are enforced always."""


class PlainFormat(_Strict):
    """Text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(_Strict):
    """JSON that a schema allows."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class Structure(_Strict):
    """What must follow a trigger."""

    begin: str
    schema_: _SchemaObject = Field(alias="schema")
    end: str


class TagFormat(_Strict):
    """Free text with structures in it."""

    type: Literal["structural_tag"]
    structures: list[Structure] = Field(min_length=1, fail_fast=True)
    triggers: list[Annotated[str, Field(min_length=1)]] = Field(min_length=1, fail_fast=True)


def _format_kind(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return {"json_schema": "<schema>", "structural_tag": "<tag>"}.get(str(kind), "<plain>")


ResponseFormat = Annotated[
    Annotated[PlainFormat, Tag("<plain>")]
    | Annotated[SchemaFormat, Tag("<schema>")]
    | Annotated[TagFormat, Tag("<tag>")],
    Discriminator(_format_kind),
]


class StructuredOutputs(_Strict):
    """vLLM's way to ask: exactly one of these."""

    json_: _SpelledSchema | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1, fail_fast=True)
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    whitespace_pattern: str | None = None
    disable_fallback: bool | None = None
    """Accepted without effect: there is one library behind it. Likewise the next two."""
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


class StructuredFields(_Strict):
    """Fields of a body that ask for a form of output."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: _SpelledSchema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, min_length=1, fail_fast=True)
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    """Accepted without effect."""


def wanted_grammar(body: StructuredFields) -> WantedGrammar | None:
    """The grammar that a body asks for; None if its output is free.

    Raises:
        InvalidRequest: it asks for several, or for one that cannot be read.
    """
    wishes = list(_wishes(body))
    if not wishes:
        return None
    if len(wishes) > 1:
        names = " and ".join(param for param, _ in wishes)
        raise InvalidRequest(f"{names}: only one form of output can be asked for", wishes[1][0])
    param, make = wishes[0]
    try:
        text = make()
    except RecursionError:
        raise InvalidRequest(f"{param}: is nested too deeply", param) from None
    except ValueError as error:
        raise InvalidRequest(f"{param}: {error}", param) from error
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(
            f"{param}: has {len(text)} characters once spelled out, the limit is {MAX_GRAMMAR_CHARS}", param
        )
    return WantedGrammar(text, param, _schema_of(body))


def parsed_schema(schema: dict[str, Any] | bool | str) -> dict[str, Any] | bool:
    """A schema that may be given as its text.

    Raises:
        ValueError: it is no schema.
    """
    found = orjson.loads(schema) if isinstance(schema, str) else schema
    if not isinstance(found, dict | bool):
        raise ValueError("a schema must be a JSON object")
    return found


def _wishes(body: StructuredFields) -> list[tuple[str, Callable[[], str]]]:
    wishes: list[tuple[str, Callable[[], str]]] = []
    form = body.response_format
    if isinstance(form, SchemaFormat):
        schema = form.json_schema.schema_
        wishes.append(
            ("response_format", lambda: json_schema_grammar({"type": "object"} if schema is None else schema))
        )
    elif isinstance(form, TagFormat):
        wishes.append(("response_format", lambda: _tags(form)))
    elif form is not None and form.type == "json_object":
        wishes.append(("response_format", json_object_grammar))
    asked = body.structured_outputs
    if asked is not None:
        found = _vllm_wishes(
            "structured_outputs.",
            asked.json_,
            asked.regex,
            asked.choice,
            asked.grammar,
            asked.whitespace_pattern,
        )
        if asked.whitespace_pattern is not None and asked.json_ is None and not asked.json_object:
            raise _not_of_json("structured_outputs.whitespace_pattern", "json or json_object")
        if asked.json_object:
            space = asked.whitespace_pattern or WHITESPACE
            found.append(("structured_outputs.json_object", lambda: json_object_grammar(space)))
        if asked.structural_tag is not None:
            tag = asked.structural_tag
            found.append(("structured_outputs.structural_tag", lambda: _tags(_tag_format(tag))))
        if not found:
            raise InvalidRequest(
                "structured_outputs: names no form; give one of json, regex, choice, grammar, json_object, "
                "structural_tag",
                "structured_outputs",
            )
        wishes += found
    if body.guided_whitespace_pattern is not None and body.guided_json is None:
        raise _not_of_json("guided_whitespace_pattern", "guided_json")
    wishes += _vllm_wishes(
        "guided_",
        body.guided_json,
        body.guided_regex,
        body.guided_choice,
        body.guided_grammar,
        body.guided_whitespace_pattern,
    )
    return wishes


def _not_of_json(param: str, fields: str) -> InvalidRequest:
    return InvalidRequest(
        f"{param}: says what stands between the tokens of JSON: give it with {fields}, or leave it out", param
    )


def _schema_of(body: StructuredFields) -> Schema | None:
    """The schema behind the only wish, where it is one."""
    form, asked = body.response_format, body.structured_outputs
    if isinstance(form, SchemaFormat):
        schema = form.json_schema.schema_
        return {"type": "object"} if schema is None else schema
    if isinstance(form, PlainFormat) and form.type == "json_object":
        return {"type": "object"}
    if asked is not None and asked.whitespace_pattern is None:
        if asked.json_object:
            return {"type": "object"}
        return parsed_schema(asked.json_) if asked.json_ is not None else None
    if body.guided_json is not None and body.guided_whitespace_pattern is None:
        return parsed_schema(body.guided_json)
    return None


def _vllm_wishes(
    prefix: str,
    schema: dict[str, Any] | bool | str | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
    whitespace: str | None,
) -> list[tuple[str, Callable[[], str]]]:
    wishes: list[tuple[str, Callable[[], str]]] = []
    if schema is not None:
        wishes.append(
            (f"{prefix}json", lambda: json_schema_grammar(parsed_schema(schema), whitespace or WHITESPACE))
        )
    if regex is not None:
        wishes.append((f"{prefix}regex", lambda: regex_grammar(regex)))
    if choice is not None:
        wishes.append((f"{prefix}choice", lambda: choice_grammar(choice)))
    if grammar is not None:
        wishes.append((f"{prefix}grammar", lambda: text_grammar(grammar)))
    return wishes


def _tag_format(text: str) -> TagFormat:
    try:
        return TagFormat.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        said = first["msg"][:1].lower() + first["msg"][1:]
        raise ValueError(f"{place}: {said}" if place else said) from None


def _tags(form: TagFormat) -> str:
    return structural_tag_grammar(form.triggers, [(s.begin, s.schema_, s.end) for s in form.structures])
