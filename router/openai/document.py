"""The OpenAPI document: bodies are read by hand, so their schemas are put in by hand."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from router.openai.embeddings import EmbeddingBody
from router.openai.responses_schema import ResponsesBody
from router.openai.schema import ChatBody, CompletionBody
from router.openai.tokenize import DetokenizeBody, TokenizeBody

_BODIES = (ChatBody, CompletionBody, EmbeddingBody, ResponsesBody, TokenizeBody, DetokenizeBody)

_REFERENCE = "#/components/schemas/{model}"


def body_of(name: str) -> dict[str, Any]:
    """What a route that reads the model ``name`` says in ``openapi_extra``."""
    schema = {"$ref": _REFERENCE.format(model=name)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def document(app: FastAPI) -> dict[str, Any]:
    """The document with the schemas of all bodies."""
    if app.openapi_schema is None:
        _, schemas = models_json_schema([(body, "validation") for body in _BODIES], ref_template=_REFERENCE)
        found = FastAPI.openapi(app)
        found.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        app.openapi_schema = found
    return app.openapi_schema
