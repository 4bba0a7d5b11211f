"""``POST /tokenize`` and ``POST /detokenize``, with the fields of vLLM's."""

from __future__ import annotations

import asyncio
from typing import Any, Self

from pydantic import Field, model_validator

from router.ingress import Ingress
from router.openai.messages import conversation, template_options
from router.openai.sampling import check_token_ids
from router.openai.schema import Body, ChatMessage, TemplateFields
from router.openai.tools import listed_tools
from router.served_model import ServedModel
from router.tenancy.keys import Tenant
from workers.engine.errors import InvalidRequest


class TokenizeBody(TemplateFields):
    """Body of ``POST /tokenize``: text, or a conversation with what its template is shown besides."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, fail_fast=True)
    add_special_tokens: bool | None = None
    """Of a prompt that is text: what the tokenizer adds by itself. (default: true)"""
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def exactly_one(self) -> Self:
        """One of the two must be there, and nothing that is the other's; a field that is off asks for nothing."""
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.prompt is not None:
            told = next((name for name in TemplateFields.model_fields if getattr(self, name)), None)
            if told is not None:
                raise InvalidRequest(
                    f"{told}: is told to a chat template: give messages instead of prompt", told
                )
        elif self.add_special_tokens:
            raise InvalidRequest(
                "add_special_tokens: a chat template writes its own: leave it out, or give a prompt",
                "add_special_tokens",
            )
        return self


class DetokenizeBody(Body):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[int] = Field(fail_fast=True)


async def tokenize(ingress: Ingress, tenant: Tenant, body: TokenizeBody) -> dict[str, Any]:
    """Token ids of a prompt or a conversation, as a generation would see them.

    Raises:
        UserError: an unknown model, a text that is too long, or messages that its template refuses.
        Forbidden, RateLimited: the key does not reach so far.
    """
    model = _model(ingress, body.model)
    with ingress.gate.visit(tenant, model.config.served_names):
        token_ids = await _token_ids(model, body)
    answer: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": model.max_model_len,
        "tokens": token_ids,
    }
    if body.return_token_strs:
        answer["token_strs"] = await asyncio.to_thread(_spelled, model, token_ids)
    return answer


async def detokenize(ingress: Ingress, tenant: Tenant, body: DetokenizeBody) -> dict[str, Any]:
    """Text of token ids, control tokens included.

    Raises:
        UserError: an unknown model, or an id outside its vocabulary.
        Forbidden, RateLimited: the key does not reach so far.
    """
    model = _model(ingress, body.model)
    model.check_num_ids(len(body.tokens), "tokens")
    check_token_ids(body.tokens, len(model.tokenizer.table), "tokens")
    with ingress.gate.visit(tenant, model.config.served_names):
        text = await asyncio.to_thread(model.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return {"prompt": text}


def _model(ingress: Ingress, name: str | None) -> ServedModel:
    """The model named, or the first one."""
    return ingress.models[0] if name is None and ingress.models else ingress.model(name or "")


async def _token_ids(model: ServedModel, body: TokenizeBody) -> list[int]:
    if body.messages is None:
        assert body.prompt is not None, "the schema asks for one of the two"
        return await model.token_ids_of_text(
            body.prompt, add_special_tokens=body.add_special_tokens is not False
        )
    options = template_options(body, listed_tools(body.tools))
    return await model.token_ids_of_chat(conversation(body.messages, model.tokenizer.chat_template, options))


def _spelled(model: ServedModel, token_ids: list[int]) -> list[str]:
    table = model.tokenizer.table
    return [table.bytes_of(i).decode("utf-8", "replace") for i in token_ids]
