"""llama-index, litellm, AutoGen and the official client, run by an interpreter that has them."""

from __future__ import annotations

import os

import pytest

URL = os.environ.get("SHOAL_URL", "")
MODEL = os.environ.get("SHOAL_MODEL", "")
MESSAGES = [{"role": "user", "content": "What is gravity?"}]

pytestmark = pytest.mark.skipif(not URL, reason="run by test_clients.py against a server")


@pytest.fixture
def llama_index():
    module = pytest.importorskip("llama_index.llms.openai_like")
    return module.OpenAILike(
        model=MODEL, api_base=f"{URL}/v1", api_key="none", is_chat_model=True, max_tokens=16, temperature=0
    )


def test_llama_index_chats_completes_and_streams(llama_index) -> None:
    from llama_index.core.llms import ChatMessage

    messages = [ChatMessage(role="user", content="What is gravity?")]
    whole = llama_index.chat(messages).message.content
    streamed = "".join(piece.delta or "" for piece in llama_index.stream_chat(messages))

    assert whole
    assert streamed == whole
    assert llama_index.complete("The capital of France is").text


async def test_llama_index_is_asynchronous(llama_index) -> None:
    answer = await llama_index.acomplete("The capital of France is")
    pieces = [
        piece.delta or "" async for piece in await llama_index.astream_complete("The capital of France is")
    ]

    assert "".join(pieces) == answer.text


def litellm_options() -> dict[str, object]:
    return {
        "model": f"openai/{MODEL}",
        "api_base": f"{URL}/v1",
        "api_key": "none",
        "max_tokens": 16,
        "temperature": 0,
    }


def test_litellm_chats_streams_and_embeds() -> None:
    litellm = pytest.importorskip("litellm")

    whole = litellm.completion(messages=MESSAGES, **litellm_options())
    streamed = litellm.completion(messages=MESSAGES, stream=True, **litellm_options())
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    vectors = litellm.embedding(
        model=f"openai/{MODEL}",
        input=["a", "b"],
        api_base=f"{URL}/v1",
        api_key="none",
        encoding_format="float",
    )

    assert whole.choices[0].message.content == text
    assert whole.usage.total_tokens > 0
    assert len(vectors.data) == 2


def test_litellm_tells_a_bad_request_from_others() -> None:
    litellm = pytest.importorskip("litellm")

    with pytest.raises(litellm.BadRequestError):
        litellm.completion(messages=MESSAGES, **{**litellm_options(), "temperature": 9})
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=MESSAGES, **{**litellm_options(), "model": "openai/nobody"})


async def test_autogen_creates_and_streams() -> None:
    pytest.importorskip("autogen_ext.models.openai")
    from autogen_core.models import ModelFamily, ModelInfo, UserMessage
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info = ModelInfo(
        vision=False,
        function_calling=False,
        json_output=True,
        family=ModelFamily.UNKNOWN,
        structured_output=True,
    )
    client = OpenAIChatCompletionClient(
        model=MODEL, base_url=f"{URL}/v1", api_key="none", model_info=info, max_tokens=16, temperature=0
    )
    messages = [UserMessage(content="What is gravity?", source="user")]

    whole = await client.create(messages)
    pieces = [piece async for piece in client.create_stream(messages)]

    assert whole.usage.completion_tokens > 0
    assert "".join(piece for piece in pieces if isinstance(piece, str)) == whole.content
    await client.close()


def test_the_official_client_times_out_and_tries_again() -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=1)

    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.001).chat.completions.create(model=MODEL, messages=MESSAGES)
    again = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4, timeout=60)

    assert again.choices[0].message.content
