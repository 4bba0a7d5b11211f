"""Calls that are wrong have a status, words and the field at fault; whoever calls beside them is not hurt."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import grpc.aio
import pytest

from router.config import Limits
from router.rpc.proto import inference_pb2 as pb
from router.scripted_replica import ScriptedReplica
from router.tenancy.keys import KeyRing, Tenant, digest_of, ring_of_keys
from tests.router.loop_turns import longest_turn_s

INVALID = grpc.StatusCode.INVALID_ARGUMENT
SAID = {"role": "user", "content": "a"}


def talk(*messages: dict[str, str]) -> dict[str, Any]:
    return {"conversation": {"messages": list(messages)}}


async def call(channel: grpc.aio.Channel, data: bytes | dict[str, Any], **options: Any) -> list[Any]:
    """Send a message, or any bytes; all that comes back."""
    if isinstance(data, dict):
        data = pb.GenerateRequest(**{"model": "tiny", **data}).SerializeToString()
    generate = channel.unary_stream(
        "/shoal.inference.v1.Inference/Generate", response_deserializer=pb.GenerateResponse.FromString
    )
    return [one async for one in generate(data, **options)]


async def refused(channel: grpc.aio.Channel, data: bytes | dict[str, Any], **options: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, data, **options)
    assert caught.value.details()
    return caught.value


def trailing(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    return dict(error.trailing_metadata() or ())


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "a", "temperature": float("nan")}, "temperature"),
    ({"prompt": "a", "top_p": float("inf")}, "top_p"),
    ({"prompt": "a", "logit_bias": {5: float("nan")}}, "logit_bias.5"),
    ({"prompt": "a", "logit_bias": {999: 1.0}}, "logit_bias"),
    ({"prompt": "a", "max_tokens": 2**32 - 1}, "max_tokens"),
    ({"prompt": "a", "n": 2**32 - 1}, "n"),
    ({"prompt": "a", "top_k": -2}, "top_k"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "stop": ["", "b"]}, "stop[0]"),
    ({"prompt": "a", "stop_token_ids": [3, 999]}, "stop_token_ids[1]"),
    ({"prompt": "a" * 100_000}, "prompt"),
    ({"prompt_token_ids": {}}, "prompt_token_ids.ids"),
    ({"prompt_token_ids": {"ids": [1, 2**32 - 1]}}, "prompt_token_ids.ids[1]"),
    ({"prompt_token_ids": {"ids": [1] * 5000}}, "prompt_token_ids.ids"),
    (talk(), "conversation.messages"),
    (talk({"role": "wizard", "content": "a"}), "conversation.messages[0].role"),
    (talk(SAID, {"content": "a"}), "conversation.messages[1].role"),
    (talk({**SAID, "content": "a" * 100_000}), "conversation.messages"),
    (talk(*[SAID] * 20_001), "conversation.messages"),
    ({**talk(SAID), "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "json_schema": "{"}, "json_schema"),
    ({"prompt": "a", "json_schema": '{"type": "string", "not": {}}'}, "json_schema"),
    ({"prompt": "a", "regex": "("}, "regex"),
    ({"prompt": "a", "grammar": "start: nowhere"}, "grammar"),
    ({"prompt": "a", "choice": {}}, "choice.texts"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: str(value)[:50])
async def test_a_wrong_field_is_named_as_the_message_calls_it(
    connect: Any, fields: dict[str, Any], param: str
) -> None:
    _, channel = await connect(ScriptedReplica())

    error = await refused(channel, fields)

    assert (error.code(), trailing(error).get("shoal-param")) == (INVALID, param)
    assert not any(word in error.details() for word in ("guided_", "top_logprobs"))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\xff\xff\xff", "no GenerateRequest"),
        (b"\x0a\x04ti\xff\xfe\x12\x01a", "UTF-8"),
        (b"\x0a\x40tiny", "cut short"),
        (b"\x0a\x04tiny\x12\x01a\xf8\x07\x01", "field number 127"),
        (b"\x0a\x04tiny\x28\x01\x10\x05", "field number 2"),
        (b"", "input"),
    ],
    ids=["no protobuf", "no UTF-8", "cut short", "unknown field", "field of another type", "empty"],
)
async def test_bytes_that_are_no_request_are_the_callers_mistake(
    connect: Any, data: bytes, says: str
) -> None:
    _, channel = await connect(ScriptedReplica())

    error = await refused(channel, data)

    assert error.code() is INVALID
    assert says in error.details() or says in str(error.trailing_metadata())
    assert await call(channel, {"prompt": "a", "max_tokens": 1})


UNKNOWN = b"\x48\x01"
"""Field number 9."""


def nested(field: int, inner: bytes) -> bytes:
    """A field that holds a message."""
    return bytes([field << 3 & 0x7F | 0x82, field >> 4, len(inner)]) + inner


@pytest.mark.parametrize(
    ("data", "param", "number"),
    [
        (nested(25, b"\x0a\x01a" + UNKNOWN), "choice", 9),
        (nested(3, b"\x0a\x01\x05" + UNKNOWN), "prompt_token_ids", 9),
        (nested(4, UNKNOWN), "conversation", 9),
        (nested(4, nested(1, b"\x0a\x04user") + nested(1, UNKNOWN)), "conversation.messages[1]", 9),
        (nested(19, b"\x08\x05\x11" + bytes(8) + UNKNOWN), None, 19),
    ],
    ids=["texts", "token ids", "conversation", "message", "entry of a map"],
)
async def test_a_field_that_is_not_known_is_refused_however_deep_it_stands(
    connect: Any, data: bytes, param: str | None, number: int
) -> None:
    _, channel = await connect(ScriptedReplica())

    error = await refused(channel, b"\x0a\x04tiny" + data)

    assert (error.code(), trailing(error).get("shoal-param")) == (INVALID, param)
    assert f"field number {number} of {param or 'the message'} is not known" in error.details()


async def test_a_message_may_be_as_long_as_a_body_and_no_longer(connect: Any) -> None:
    _, channel = await connect(ScriptedReplica(), limits=Limits(max_body_bytes=6 << 20))
    within, beyond = ({"prompt": "a" * (num << 20)} for num in (5, 7))

    assert (await refused(channel, within)).code() is INVALID
    assert (await refused(channel, beyond)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    squeezed = await refused(channel, {"prompt": "a" * (200 << 20)}, compression=grpc.Compression.Gzip)
    assert squeezed.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await call(channel, {"prompt": "a", "max_tokens": 1}, compression=grpc.Compression.Gzip)


async def test_the_loop_runs_on_while_a_long_message_is_read(connect: Any) -> None:
    _, channel = await connect(ScriptedReplica())
    many = pb.GenerateRequest(
        model="tiny", conversation={"messages": [{**SAID, "content": "a" * 20}] * 600_000}
    )
    asked = asyncio.ensure_future(refused(channel, many.SerializeToString()[: 8 << 20]))

    turn_s = await longest_turn_s(asked)

    assert (await asked).code() in (INVALID, grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert turn_s < 0.5, turn_s


async def test_a_call_that_runs_out_of_time_ends_its_request(connect: Any) -> None:
    edge, channel = await connect(ScriptedReplica(step_s=None))

    error = await refused(channel, {"prompt": "a"}, timeout=0.3)

    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await edge.replica.until(lambda: bool(edge.replica.cancelled_ids))
    await edge.until(lambda: edge.replica_set.num_placed == 0)


@pytest.mark.parametrize(
    "metadata",
    [(), (("authorization", "Bearer wrong"),), (("authorization", "sk-123456"),), (("authorization", ""),)],
    ids=["none", "wrong", "no scheme", "empty"],
)
async def test_a_call_without_a_valid_key_is_not_let_in(connect: Any, metadata: Any) -> None:
    edge, channel = await connect(ScriptedReplica(), keys=ring_of_keys(["sk-123456"]))

    error = await refused(channel, b"\xff\xff", metadata=metadata)

    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert trailing(error)["shoal-code"] == "invalid_api_key"
    assert not edge.replica.submits


async def test_limits_and_rights_of_a_key_hold(connect: Any) -> None:
    ring = KeyRing(
        [
            Tenant("rare", digest_of("sk-rare"), requests_per_minute=1),
            Tenant("other", digest_of("sk-other"), models=frozenset({"big"})),
        ]
    )
    _, channel = await connect(ScriptedReplica(), keys=ring)
    rare, other = ((("authorization", f"Bearer sk-{name}"),) for name in ("rare", "other"))
    await call(channel, {"prompt": "a", "max_tokens": 1}, metadata=rare)

    limited = await refused(channel, {"prompt": "a"}, metadata=rare)
    forbidden = await refused(channel, {"prompt": "a"}, metadata=other)

    assert limited.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert 1 <= int(trailing(limited)["retry-after"]) <= 61
    assert forbidden.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_bug_is_internal_and_tells_no_details(
    connect: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    edge, channel = await connect(ScriptedReplica())

    def fail(*arguments: Any) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(edge.replica_set, "place", fail)
    with caplog.at_level(logging.ERROR):
        error = await refused(channel, {"prompt": "a"}, metadata=(("x-request-id", "find-me"),))

    assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "internal error")
    assert "find-me" in caplog.text


async def test_a_call_can_be_asked_about_by_its_id(connect: Any) -> None:
    edge, channel = await connect(ScriptedReplica())
    data = pb.GenerateRequest(model="tiny", prompt="a", max_tokens=2).SerializeToString()
    generate = channel.unary_stream("/shoal.inference.v1.Inference/Generate")(
        data, metadata=(("x-request-id", "mine"),)
    )

    assert dict(await generate.initial_metadata())["x-request-id"] == "mine"
    async for _ in generate:
        pass
    told = (await edge.client.get("/v1/shoal/requests/mine")).json()
    assert (told["state"], told["outcome"]) == ("ended", "finished")


async def test_bad_calls_hurt_nobody_beside_them(connect: Any) -> None:
    _, channel = await connect(ScriptedReplica())
    bad = [fields for fields, _ in BAD if len(str(fields)) < 1000]

    results = await asyncio.gather(
        *(call(channel, fields) for fields in bad),
        *(call(channel, {"prompt": "hello", "max_tokens": 5}) for _ in bad),
        return_exceptions=True,
    )

    assert all(isinstance(one, grpc.aio.AioRpcError) for one in results[: len(bad)])
    assert all(isinstance(one, list) and one[-1].usage.prompt_tokens == 5 for one in results[len(bad) :])


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"regex": "[0-9]{3}"}, "123"),
        ({"choice": {"texts": ["yes", "no"]}}, "no"),
        ({"json_object": True}, "{}"),
        ({"json_schema": '{"type": "integer"}'}, "7"),
        ({"grammar": 'start: "ab"'}, "ab"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_a_form_of_output_reaches_the_replica_as_over_http(
    connect: Any, fields: dict[str, Any], text: str
) -> None:
    edge, channel = await connect(ScriptedReplica(script=lambda submit: list(text.encode())))
    over_http = {
        "regex": lambda value: {"guided_regex": value},
        "choice": lambda value: {"guided_choice": value["texts"]},
        "json_object": lambda value: {"response_format": {"type": "json_object"}},
        "json_schema": lambda value: {"guided_json": value},
        "grammar": lambda value: {"guided_grammar": value},
    }
    ((form, value),) = fields.items()

    await call(channel, {"prompt": "a", "max_tokens": 9, **fields})
    await edge.complete(prompt="a", max_tokens=9, **over_http[form](value))

    grpc_submit, http_submit = edge.replica.submits
    assert grpc_submit.params.grammar == http_submit.params.grammar != ""
