"""LangChain's own standard tests for chat models, run by an interpreter that has LangChain."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("langchain_tests")

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests

URL = os.environ.get("SHOAL_URL", "")
MODEL = os.environ.get("SHOAL_MODEL", "")
OBEYS = "SHOAL_OBEYS" in os.environ
"""The model behind it does as it is told (``tests/router/obedient_server.py``)."""

pytestmark = pytest.mark.skipif(not URL, reason="run by test_clients.py against a server")


class TestChat(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, object]:
        return {
            "base_url": f"{URL}/v1", "api_key": "none", "model": MODEL, "temperature": 0, "stream_usage": True,
            "max_tokens": 200 if OBEYS else 16,
        }  # fmt: skip

    # Before the demo model the other half of the tests would ask whether 135 M parameters suffice to call the right
    # function, or to end a joke within 16 tokens.
    @property
    def has_tool_calling(self) -> bool:
        return OBEYS

    @property
    def has_structured_output(self) -> bool:
        return OBEYS

    @property
    def structured_output_kwargs(self) -> dict[str, object]:
        return {"method": "json_schema"}

    @property
    def supports_json_mode(self) -> bool:
        return OBEYS


class TestEmbeddings(EmbeddingsIntegrationTests):
    @property
    def embeddings_class(self) -> type[OpenAIEmbeddings]:
        return OpenAIEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, object]:
        return {
            "base_url": f"{URL}/v1", "api_key": "none", "model": MODEL, "check_embedding_ctx_length": False,
        }  # fmt: skip
