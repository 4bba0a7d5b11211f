"""``/v1/completions``: prompts of every form, echo, logprobs, streams."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.scripted_replica import ScriptedReplica


def says(text: str):
    return lambda submit: list(text.encode())


async def test_a_prompt_of_any_form_is_completed(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=says("xyz")))
    forms: list[tuple[Any, list[bytes]]] = [
        ("ab", [b"ab"]),
        (["ab", "cd"], [b"ab", b"cd"]),
        ([97, 98], [b"ab"]),
        ([[97], [98, 99]], [b"a", b"bc"]),
    ]
    for prompt, sent in forms:
        edge.replica.submits.clear()

        body = (await edge.complete(prompt=prompt, max_tokens=3)).json()

        assert sorted(bytes(s.prompt_token_ids) for s in edge.replica.submits) == sent
        assert [(c["index"], c["text"]) for c in body["choices"]] == [(i, "xyz") for i in range(len(sent))]
        assert body["usage"]["prompt_tokens"] == sum(map(len, sent))


async def test_choices_of_each_prompt_stand_together(make_edge) -> None:
    edge = await make_edge(
        ScriptedReplica(script=lambda s: [*s.prompt_token_ids, 48 + s.params.choice_index])
    )

    body = (await edge.complete(prompt=["a", "b"], n=2, max_tokens=2)).json()

    assert [choice["text"] for choice in body["choices"]] == ["a0", "a1", "b0", "b1"]
    assert body["usage"]["prompt_tokens"] == 2


async def test_sixteen_tokens_are_the_default(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=says("a" * 99)))

    assert len((await edge.complete()).json()["choices"][0]["text"]) == 16


async def test_an_echo_comes_first_streamed_or_not(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=says("!?")))

    whole = (await edge.complete(echo=True, max_tokens=2)).json()
    streamed = (await edge.complete(echo=True, max_tokens=2, stream=True)).text

    chunks = [json.loads(e.removeprefix("data: ")) for e in streamed.split("\n\n") if e.startswith("data: {")]
    assert whole["choices"][0]["text"] == "hello!?"
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["hello", "!", "?", ""]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_of_no_tokens_asks_no_replica(make_edge, stream: bool) -> None:
    edge = await make_edge(ScriptedReplica())

    answer = await edge.complete(echo=True, max_tokens=0, stream=stream)

    assert "hello" in answer.text
    assert edge.replica.submits == []


async def test_logprobs_count_characters(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=says("né")))

    logprobs = (await edge.complete(max_tokens=3, logprobs=1)).json()["choices"][0]["logprobs"]

    assert logprobs["text_offset"] == [0, 1, 1]
    assert logprobs["tokens"][0] == "n"
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["top_logprobs"][0] == {"n": -0.5}
