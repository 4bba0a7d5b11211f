"""The OpenAPI document: bodies are read by hand, so schemas of bodies, answers and errors are put in by hand."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from router.openai.embeddings import EmbeddingBody
from router.openai.responses_schema import ResponsesBody
from router.openai.schema import ChatBody, CompletionBody
from router.openai.tokenize import DetokenizeBody, TokenizeBody
from router.tenancy.door import GUARDED

_BODIES = (ChatBody, CompletionBody, EmbeddingBody, ResponsesBody, TokenizeBody, DetokenizeBody)
_REFERENCE = "#/components/schemas/{model}"
_JSON = "application/json"

_STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_EVENT = {"type": "object", "properties": {"event": {"type": "string"}, "data": {"type": "string"}}}
"""One event of a stream; its data is JSON, but for the last one's ``[DONE]``."""
_ERRORS = {
    "400": "A field is missing, unknown or out of range; `param` names it.",
    "401": "No valid API key was given.",
    "403": "The API key does not allow it.",
    "404": "No such model, path, request or response.",
    "405": "The method is not allowed on this path.",
    "408": "The body did not come in time.",
    "413": "The body is too long.",
    "415": "The body is compressed.",
    "429": "All queues are full, or a limit is reached; `Retry-After` says when to come again.",
    "500": "An error of the server.",
    "503": "No replica of the model is available.",
}
_KEY = {"key": {"type": "http", "scheme": "bearer", "description": "An API key, where the server has any."}}


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorObject(BaseModel):
    """The body of every answer that is no success."""

    error: ErrorDetail


def body_of(name: str) -> dict[str, Any]:
    """What a route that reads the model ``name`` says in ``openapi_extra``."""
    schema = {"$ref": _REFERENCE.format(model=name)}
    return {"requestBody": {"required": True, "content": {_JSON: {"schema": schema}}}}


def document(app: FastAPI, *, asks_for_keys: bool) -> dict[str, Any]:
    """The document with the schemas of all bodies, and what each path may answer."""
    if app.openapi_schema is None:
        _, schemas = models_json_schema(
            [(ErrorObject, "serialization"), *((body, "validation") for body in _BODIES)],
            ref_template=_REFERENCE,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # two methods of one route have one id, until it is set below
            found = FastAPI.openapi(app)
        components = found.setdefault("components", {})
        components["schemas"] = schemas["$defs"]
        if asks_for_keys:
            components["securitySchemes"] = _KEY
        for path, methods in found["paths"].items():
            methods.pop("head", None)  # goes without saying where there is GET
            for method, operation in methods.items():
                operation["operationId"] = f"{method}{re.sub('[^a-z0-9]+', '_', path)}".rstrip("_")
                _describe(path, operation)
                if asks_for_keys and path.startswith(GUARDED):
                    operation["security"] = [{"key": []}]
        app.openapi_schema = found
    return app.openapi_schema


def with_models(document: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The document with the names of the models that are served now."""
    schemas = copy.deepcopy(document["components"]["schemas"])
    for body in _BODIES:
        properties = schemas[body.__name__]["properties"]
        kind = {"type": "string", "enum": list(names)}
        is_optional = "anyOf" in properties["model"]
        properties["model"] = {
            "title": "Model",
            **({"anyOf": [kind, {"type": "null"}]} if is_optional else kind),
        }
    return {**document, "components": {**document["components"], "schemas": schemas}}


def _describe(path: str, operation: dict[str, Any]) -> None:
    """Say what an operation may answer."""
    answers = operation["responses"]
    answers.pop("422", None)  # FastAPI's own; ours is 400
    content: dict[str, Any] = {_JSON: {"schema": {"type": "object"}}}
    if path in _STREAMED:
        content["text/event-stream"] = {"schema": _EVENT}
    if path == "/metrics":
        content = {"text/plain": {"schema": {"type": "string"}}}
    answers["200"] = {"description": "Success", "content": content}
    error = {_JSON: {"schema": {"$ref": _REFERENCE.format(model="ErrorObject")}}}
    for status, text in _ERRORS.items():
        answers[status] = {"description": text, "content": error}
    if path == "/health":
        answers["503"] = {
            "description": "No model can be served.",
            "content": {_JSON: {"schema": {"type": "object"}}},
        }
    if path == "/v1/responses/{response_id}":
        del answers["200"]
