"""A message of the gRPC API as the body that the HTTP API would read, so that both agree; and its names in errors."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet
from pydantic import BaseModel, ValidationError

from router.openai.errors import invalid_body
from router.openai.json_limits import MAX_CONTAINERS
from router.openai.schema import ChatBody, CompletionBody
from router.rpc.proto import inference_pb2 as pb
from workers.engine.errors import InvalidRequest, UserError

_Model = TypeVar("_Model", bound=BaseModel)
_COPIED = (
    *("max_tokens", "min_tokens", "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "seed"),
)
"""Optional fields that have the same name and meaning in the HTTP API."""

_FORMS = {"json_schema": "guided_json", "regex": "guided_regex", "grammar": "guided_grammar"}
"""Forms of output that are text, with the body's names for them."""

_NAMES = {
    **{name: field for field, name in _FORMS.items()},
    "response_format": "json_object",
    "guided_choice": "choice.texts",
    "messages": "conversation.messages",
    "top_logprobs": "logprobs",
}
"""Fields of a body that the message calls otherwise."""


def parse(data: bytes) -> pb.GenerateRequest:
    """The message that a client sent.

    Raises:
        InvalidRequest: it is none, or has what messages do not have; with the message's own names.
    """
    try:
        request = pb.GenerateRequest.FromString(data)
    except DecodeError:
        raise InvalidRequest(
            "the message is no GenerateRequest: cut short, or text that is no UTF-8"
        ) from None
    num_messages = len(request.conversation.messages)
    if num_messages > MAX_CONTAINERS:
        raise InvalidRequest(
            f"conversation.messages: there are {num_messages}, the limit is {MAX_CONTAINERS}",
            "conversation.messages",
        )
    unknown = _unknown_field(request)
    if unknown is not None:
        number, param = unknown
        of = param or "the message"
        raise InvalidRequest(f"field number {number} of {of} is not known here", param)
    return request


def body_of(request: pb.GenerateRequest) -> ChatBody | CompletionBody:
    """What the same request is over HTTP.

    Raises:
        InvalidRequest: it would be refused there, too; with the body's names (``as_given``).
    """
    fields: dict[str, Any] = {"model": request.model, "ignore_eos": request.ignore_eos, **_form(request)}
    fields |= {name: getattr(request, name) for name in _COPIED if request.HasField(name)}
    if request.stop:
        fields["stop"] = list(request.stop)
    if request.stop_token_ids:
        fields["stop_token_ids"] = list(request.stop_token_ids)
    if request.logit_bias:
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in request.logit_bias.items()}
    wants_logprobs = request.HasField("logprobs")
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidRequest("give a prompt, prompt_token_ids or a conversation", "input")
    if kind == "conversation":
        fields["messages"] = [
            {"role": message.role, "content": message.content} for message in request.conversation.messages
        ]
        if wants_logprobs:
            fields |= {"logprobs": True, "top_logprobs": request.logprobs}
        return _validated(ChatBody, fields)
    fields["prompt"] = request.prompt if kind == "prompt" else list(request.prompt_token_ids.ids)
    if wants_logprobs:
        fields["logprobs"] = request.logprobs
    return _validated(CompletionBody, fields)


def as_given(param: str, request: pb.GenerateRequest) -> str:
    """The message's own name of a field of its body."""
    field, rest = param, ""
    for place, char in enumerate(param):
        if char in ".[":
            field, rest = param[:place], param[place:]
            break
    if field == "prompt" and request.WhichOneof("input") == "prompt_token_ids":
        return f"prompt_token_ids.ids{rest}"
    return _NAMES.get(field, field) + rest


def in_its_words(error: UserError, request: pb.GenerateRequest) -> tuple[str, str]:
    """Message and field of an error, with the names that the client knows; no field: empty."""
    if not error.param:
        return error.message, ""
    named = as_given(error.param, request)
    if error.message.startswith(error.param):
        return named + error.message[len(error.param) :], named
    return error.message, named


def _unknown_field(message: Message, path: str = "") -> tuple[int, str | None] | None:
    """Number of a field that ``message``, or a message in it, should not have, and the name of what has it.

    Of a map's entry the whole map is named: protobuf itself puts such an entry among the unknown fields.
    """
    unknown = UnknownFieldSet(message)
    if len(unknown):
        return unknown[0].field_number, path or None
    for field, value in message.ListFields():
        name = f"{path}.{field.name}" if path else field.name
        if isinstance(value, Message):
            inside = [(name, value)]
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            inside = [(f"{name}[{index}]", one) for index, one in enumerate(value)]
        else:
            continue
        for place, one in inside:
            if (found := _unknown_field(one, place)) is not None:
                return found
    return None


def _form(request: pb.GenerateRequest) -> dict[str, Any]:
    form = request.WhichOneof("form")
    if form is None:
        return {}
    if form == "json_object":
        return {"response_format": {"type": "json_object" if request.json_object else "text"}}
    if form == "choice":
        return {"guided_choice": list(request.choice.texts)}
    return {_FORMS[form]: getattr(request, form)}


def _validated(model: type[_Model], fields: dict[str, Any]) -> _Model:
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise invalid_body(error, fields) from None
