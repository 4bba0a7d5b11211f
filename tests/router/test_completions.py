"""``/v1/completions``: prompts of every form, echo, logprobs, streams."""

from __future__ import annotations

import asyncio
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


@pytest.mark.parametrize("num_logprobs", [0, 1, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_sampled_token_is_among_the_likeliest_whatever_its_rank(
    make_edge, num_logprobs: int, stream: bool
) -> None:
    class Unlikely(ScriptedReplica):
        def _next_output(self, running):
            output = super()._next_output(running)
            for score in output.logprobs:
                score.sampled = -7.0
                score.top_token_ids[:] = list(b"xyz"[: len(score.top_token_ids)])
            for score in output.prompt_logprobs:
                score.top_token_ids[:] = list(b"xyz"[: len(score.top_token_ids)])
            return output

    edge = await make_edge(Unlikely(script=says("ab")))
    answer = await edge.complete(prompt="pq", logprobs=num_logprobs, echo=True, stream=stream)

    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n")]
    bodies = [json.loads(line) for line in lines if line.startswith("{")]
    told = [choice["logprobs"] for body in bodies for choice in body["choices"] if choice["logprobs"]]
    tops = [top for part in told for top in part["top_logprobs"]]
    likeliest = {"x": -0.5, "y": -1.5} if num_logprobs == 2 else {"x": -0.5} if num_logprobs else {}
    assert tops[0] is None
    assert tops[1] == {**{key: value + 0.25 for key, value in likeliest.items()}, "q": -0.25}
    assert tops[2:4] == [{**likeliest, "a": -7.0}, {**likeliest, "b": -7.0}]


async def test_logprobs_count_characters(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=says("né")))

    logprobs = (await edge.complete(max_tokens=3, logprobs=1)).json()["choices"][0]["logprobs"]

    assert logprobs["text_offset"] == [0, 1, 1]
    assert logprobs["tokens"][0] == "n"
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["top_logprobs"][0] == {"n": -0.5}


async def test_the_best_of_several_is_given(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=lambda s: [48 + s.params.choice_index] * 3, step_s=None))
    logprobs = {0: -0.9, 1: -0.2, 2: -0.5}

    def likely(output, running):
        output.logprobs[0].sampled = logprobs[running.submit.params.choice_index]
        return output

    replica = edge.replica
    plain = replica._next_output
    replica._next_output = lambda running: likely(plain(running), running)
    answer = asyncio.create_task(edge.complete(prompt=["a", "b"], best_of=3, n=2, max_tokens=3))
    await replica.until(lambda: len(replica.submits) == 6)
    for _ in range(3):
        replica.step()

    body = (await answer).json()

    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "111"), (1, "222"), (2, "111"), (3, "222"),
    ]  # fmt: skip
    assert body["choices"][0]["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 18  # all were generated


async def test_a_prompt_may_be_cut_to_its_end(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(), max_model_len=100)

    await edge.complete(prompt="a" * 300 + "end", truncate_prompt_tokens=5, max_tokens=1)
    await edge.complete(prompt="a" * 300 + "end", truncate_prompt_tokens=-1, max_tokens=10)
    await edge.chat(
        messages=[{"role": "user", "content": "a" * 300}], truncate_prompt_tokens=20, max_tokens=1
    )

    first, second, third = (
        bytes(i % 256 for i in submit.prompt_token_ids) for submit in edge.replica.submits
    )
    assert first == b"aaend"
    assert len(second) == 90
    assert len(third) == 20
    assert third.endswith(b"assistant\n")


async def test_salts_keep_caches_apart(make_edge) -> None:
    edge = await make_edge(ScriptedReplica())

    for salt in (None, "mine", "mine", "yours"):
        await edge.complete(prompt="a" * 40, max_tokens=1, cache_salt=salt)

    plain, mine, again, yours = edge.replica.submits
    assert plain.hash_root == b"scripted"
    assert mine.hash_root == again.hash_root
    assert mine.block_hashes == again.block_hashes
    assert (
        len({s.hash_root for s in (plain, mine, yours)})
        == len({s.block_hashes for s in (plain, mine, yours)})
        == 3
    )


async def test_priorities_bad_words_and_allowed_tokens_reach_the_engine(make_edge) -> None:
    edge = await make_edge(ScriptedReplica())

    await edge.complete(priority=-3, bad_words=["no"], allowed_token_ids=[5, 3, 5], max_tokens=1)

    (submit,) = edge.replica.submits
    assert submit.priority == -3
    assert [bytes(word.token_ids) for word in submit.params.bad_words] == [b"no", b" no"]
    assert list(submit.params.allowed_token_ids) == [3, 5]


async def test_an_echo_has_the_log_probabilities_of_its_prompt(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=says("!?")))
    fields = {"prompt": "né", "echo": True, "logprobs": 1, "max_tokens": 2}

    whole = (await edge.complete(**fields)).json()["choices"][0]
    streamed = (await edge.complete(**fields, stream=True)).text

    assert whole["text"] == "né!?"
    logprobs = whole["logprobs"]
    assert logprobs["token_logprobs"] == [None, -0.25, -0.25, -0.5, -0.5]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3]
    assert logprobs["top_logprobs"][0] is None
    assert len(logprobs["tokens"]) == 5
    chunks = [json.loads(e.removeprefix("data: ")) for e in streamed.split("\n\n") if e.startswith("data: {")]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == "né!?"
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert [value for part in parts for value in part["token_logprobs"]] == logprobs["token_logprobs"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_may_be_scored_without_a_token_more(make_edge, stream: bool) -> None:
    edge = await make_edge(ScriptedReplica(script=says("!?")))

    answer = await edge.complete(prompt="abc", echo=True, logprobs=0, max_tokens=0, stream=stream)

    assert "!" not in answer.text
    if not stream:
        body = answer.json()
        assert body["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.25, -0.25]
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == 0


async def test_prompt_logprobs_are_told_by_token_id(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=says("!")))

    plain = (await edge.complete(prompt="ab", prompt_logprobs=2, max_tokens=1)).json()["choices"][0]
    chat = (await edge.chat(prompt_logprobs=0, max_tokens=1)).json()
    without = (await edge.chat(max_tokens=1)).json()

    first, second = plain["prompt_logprobs"]
    assert first is None
    assert second == {
        "98": {"logprob": -0.25, "rank": 1, "decoded_token": "b"},
        "99": {"logprob": -1.25, "rank": 2, "decoded_token": "c"},
    }
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in without
