"""Embeddings: one vector for each text, as the official client asks for them."""

from __future__ import annotations

import asyncio
import base64
import struct
from typing import Any

import openai
import pytest

from router.generation import MAX_AT_ONCE
from router.scripted_replica import ScriptedReplica


async def embed(edge: Any, **fields: Any):
    return await edge.client.post("/v1/embeddings", json={"model": "tiny", "input": "hello", **fields})


def raw(num_tokens: int) -> list[float]:
    """What the scripted replica says of a prompt."""
    return [float(num_tokens + i) for i in range(4)]


async def test_a_text_has_a_vector_of_length_one(make_edge) -> None:
    edge = await make_edge(ScriptedReplica())

    response = await embed(edge)

    body = response.json()
    (item,) = body["data"]
    assert (response.status_code, body["object"], item["object"], item["index"]) == (
        200,
        "list",
        "embedding",
        0,
    )
    assert sum(value * value for value in item["embedding"]) == pytest.approx(1)
    assert body["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    (submit,) = edge.replica.submits
    assert (submit.params.pooling, submit.params.max_tokens) == ("mean", 1)


async def test_base64_holds_the_same_numbers(make_edge) -> None:
    edge = await make_edge(ScriptedReplica())

    as_floats = (await embed(edge)).json()["data"][0]["embedding"]
    packed = (await embed(edge, encoding_format="base64")).json()["data"][0]["embedding"]

    assert list(struct.unpack("<4f", base64.b64decode(packed))) == as_floats


async def test_fewer_dimensions_are_the_leading_ones_brought_to_length_one(make_edge) -> None:
    edge = await make_edge(ScriptedReplica())

    plain = (await embed(edge, dimensions=2, normalize=False)).json()["data"][0]["embedding"]
    unit = (await embed(edge, dimensions=2)).json()["data"][0]["embedding"]

    assert plain == raw(5)[:2]
    assert unit == pytest.approx([5 / 61**0.5, 6 / 61**0.5])


@pytest.mark.parametrize(
    "given", [["a", "bcd"], [[1, 2, 3], [4]], [1, 2, 3]], ids=["texts", "id lists", "ids"]
)
async def test_lists_keep_their_order(make_edge, given: Any) -> None:
    edge = await make_edge(ScriptedReplica())
    texts = given if isinstance(given[0], str | list) else [given]

    data = (await embed(edge, input=given, normalize=False)).json()["data"]

    assert [item["embedding"] for item in data] == [raw(len(text)) for text in texts]


async def test_a_long_list_is_sent_in_portions(make_edge) -> None:
    replica = ScriptedReplica(step_s=None)
    edge = await make_edge(replica)
    answer = asyncio.create_task(embed(edge, input=["x"] * 300))
    await replica.until(lambda: replica.num_running == MAX_AT_ONCE)
    seen = [replica.num_running]
    while len(replica.submits) < 300 or replica.num_running:
        replica.step()
        known = len(replica.submits)
        await edge.until(lambda known=known: len(replica.submits) > known or len(replica.submits) == 300)
        seen.append(replica.num_running)

    assert len((await answer).json()["data"]) == 300
    assert max(seen) <= MAX_AT_ONCE


async def test_a_text_too_long_is_refused_or_cut(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(), max_model_len=10)

    refused = await embed(edge, input="a" * 11)
    whole = await embed(edge, input="b" * 10)
    cut = await embed(edge, input="a" * 20 + "bc", truncate_prompt_tokens=3)
    longest = await embed(edge, input="a" * 20, truncate_prompt_tokens=-1)

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
    assert [bytes(submit.prompt_token_ids) for submit in edge.replica.submits] == [
        b"b" * 10,
        b"abc",
        b"a" * 10,
    ]
    assert whole.status_code == cut.status_code == longest.status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [1, 999]}, "input[1]"),
        ({"input": [[1], [999]]}, "input[1][0]"),
        ({"input": ["a", "a" * 5000]}, "input[1]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 5}, "dimensions"),
        ({"pooling": "max"}, "pooling"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"stream": True}, "stream"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_wrong_field_is_named(make_edge, fields: dict[str, Any], param: str) -> None:
    edge = await make_edge(ScriptedReplica())

    response = await embed(edge, **fields)

    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_the_official_client_embeds(make_edge) -> None:
    edge = await make_edge(ScriptedReplica())
    async with openai.AsyncOpenAI(base_url=f"{await edge.listen()}/v1", api_key="none") as client:
        answer = await client.embeddings.create(model="tiny", input=["a", "bc"], dimensions=3)

    assert [len(item.embedding) for item in answer.data] == [3, 3]
    assert answer.usage.total_tokens == 3
