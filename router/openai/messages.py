"""Messages of a body as a model's chat template takes them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from pydantic_core import from_json

from router.openai.json_limits import check_width
from router.openai.schema import ChatMessage, TemplateFields
from router.text.chat_template import ChatTemplate, TemplateOptions
from router.text.conversation import Conversation
from router.text.tools.formats import Tool
from workers.engine.errors import InvalidRequest


def conversation(
    messages: Sequence[ChatMessage], template: ChatTemplate | None, options: TemplateOptions
) -> Conversation:
    """What a template is to be shown of a body's messages, whose wrong ones show when they are spelled."""
    texts = [message.text for message in messages]
    return Conversation.of(messages, texts, partial(template_messages, messages, template), options)


def template_messages(
    messages: Sequence[ChatMessage], template: ChatTemplate | None
) -> list[dict[str, object]]:
    """Messages in the template's own words.

    Raises:
        InvalidRequest: a message lacks what its role needs; the field is named.
    """
    return [_message(message, f"messages[{i}]", template) for i, message in enumerate(messages)]


def template_options(body: TemplateFields, tools: Sequence[Tool]) -> TemplateOptions:
    """What else the template is told, with the functions that it shows.

    Raises:
        InvalidRequest: the last message cannot both be over and go on.
    """
    goes_on = bool(body.continue_final_message)
    if goes_on and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message: not together with add_generation_prompt", "continue_final_message"
        )
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    return TemplateOptions(
        add_generation_prompt=not goes_on and body.add_generation_prompt is not False,
        continue_final_message=goes_on,
        tools=[tool.spelled() for tool in tools],
        kwargs=kwargs,
    )


def _message(message: ChatMessage, place: str, template: ChatTemplate | None) -> dict[str, object]:
    is_developer = message.role == "developer" and not (template is not None and template.knows_developer)
    found: dict[str, object] = {"role": "system" if is_developer else message.role}
    if message.content is None and not message.tool_calls and not message.refusal:
        raise InvalidRequest(f"{place}.content: is missing", f"{place}.content")
    if message.refuses and message.role != "assistant":
        field = f"{place}.refusal" if message.refusal else f"{place}.content"
        raise InvalidRequest(f"{field}: only an assistant refuses", field)
    text = message.text
    parts = template is not None and template.takes_parts
    found["content"] = [{"type": "text", "text": text}] if parts else text
    if message.tool_calls:
        if message.role != "assistant":
            raise InvalidRequest(f"{place}.tool_calls: only an assistant calls", f"{place}.tool_calls")
        found["tool_calls"] = [
            {
                "type": "function",
                "id": call.id or f"call_{i}",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(
                        call.function.arguments, f"{place}.tool_calls[{i}].function.arguments"
                    ),
                },
            }
            for i, call in enumerate(message.tool_calls)
        ]
    if message.role == "tool":
        if message.tool_call_id is None:
            raise InvalidRequest(f"{place}.tool_call_id: is missing", f"{place}.tool_call_id")
        found["tool_call_id"] = message.tool_call_id
    elif message.tool_call_id:
        raise InvalidRequest(
            f'{place}.tool_call_id: only a message of role "tool" answers a call', f"{place}.tool_call_id"
        )
    if message.name is not None:
        found["name"] = message.name
    if message.reasoning_content:
        if message.role != "assistant":
            raise InvalidRequest(
                f"{place}.reasoning_content: only an assistant thinks", f"{place}.reasoning_content"
            )
        found["reasoning_content"] = message.reasoning_content
    return found


def _arguments(text: str, param: str) -> dict[str, Any]:
    """Arguments as an object, nested no deeper than a body may be: templates spell them anew."""
    try:
        found = from_json(text or "{}", allow_inf_nan=False)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidRequest(f"{param}: must be a JSON object in a string", param)
    check_width(found, "it", param)
    return found
