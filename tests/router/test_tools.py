"""Tools in chats: what the model is shown, what it must write, and what the client gets, streamed or not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from router.scripted_replica import ScriptedReplica

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bonn", "Rome"]}, "days": {"type": "integer", "maximum": 9, "minimum": 1}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip
NOW = {"type": "function", "function": {"name": "now"}}
SAID = '{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}'
TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if thinks %}<think>{% endif %}{% endif %}"
)
HERMES = {"chat_template": TEMPLATE}


def says(text: str):
    return lambda submit: list(text.encode())


def shown(submit: Any) -> str:
    """The prompt's text."""
    return bytes(i for i in submit.prompt_token_ids if i < 256).decode()


def joined(answer: Any) -> dict[str, Any]:
    """The message that a stream's chunks make, with its finish reason."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: {")]
    for choice in (json.loads(event)["choices"][0] for event in events):
        delta = choice["delta"]
        message["content"] += delta.get("content", "")
        message["reasoning_content"] += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", []):
            if "id" in call:
                message["tool_calls"].append(
                    {"id": call["id"], "type": "function", "function": call["function"]}
                )
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        message["finish_reason"] = choice["finish_reason"]
    return message


async def both(edge, **fields: Any) -> tuple[dict[str, Any], str]:
    """The message and finish reason, whole; the streamed ones must be the same but for the calls' ids."""
    whole = await edge.chat(**fields, seed=1)
    streamed = joined(await edge.chat(**fields, seed=1, stream=True))
    assert whole.status_code == 200, whole.text
    choice = whole.json()["choices"][0]
    message = choice["message"]
    for one in (*message.get("tool_calls", []), *streamed["tool_calls"]):
        assert one.pop("id")
    assert streamed.pop("finish_reason") == choice["finish_reason"]
    assert streamed == {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "tool_calls": message.get("tool_calls", []),
    }
    return message, choice["finish_reason"]


async def test_a_call_in_the_models_own_words_is_a_call(make_edge) -> None:
    edge = await make_edge(
        ScriptedReplica(script=says(f"One moment.<tool_call>{SAID}</tool_call>")), served=HERMES
    )

    message, reason = await both(edge, tools=[WEATHER, NOW], max_tokens=200)

    assert message["content"] == "One moment."
    assert message["tool_calls"] == [
        {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn", "days": 2}'}}
    ]
    assert reason == "tool_calls"
    assert edge.replica.submits[0].params.grammar == ""
    assert "Weather of a city" in shown(edge.replica.submits[0])


async def test_a_call_alone_has_no_content(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=says(f"<tool_call>{SAID}</tool_call>")), served=HERMES)

    message, _ = await both(edge, tools=[WEATHER], max_tokens=200)

    assert message["content"] is None


async def test_with_tool_choice_none_text_is_text_and_tools_are_not_shown(make_edge) -> None:
    said = f"<tool_call>{SAID}</tool_call>"
    edge = await make_edge(ScriptedReplica(script=says(said)), served=HERMES)

    message, reason = await both(edge, tools=[WEATHER], tool_choice="none", max_tokens=200)

    assert (message["content"], reason) == (said, "stop")
    assert "Weather" not in shown(edge.replica.submits[0])


async def test_a_call_cut_off_by_max_tokens_ends_in_length(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=says(f"<tool_call>{SAID}")), served=HERMES)

    message, reason = await both(edge, tools=[WEATHER], max_tokens=50)

    assert message["tool_calls"][0]["function"]["arguments"] == '{"city'
    assert reason == "length"


DEMANDED = [
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "now"'),
    ("llama3_json", '{"name": "now", "parameters": {}}; {"name": "now"'),
    ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "now"'),
    ("json", '[{"name": "now", "arguments": {}}, {"name": "now"'),
]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
@pytest.mark.parametrize(("parser", "said"), DEMANDED, ids=lambda value: str(value)[:11])
async def test_a_demanded_call_cut_off_anywhere_is_no_text(
    make_edge, parser: str, said: str, choice: Any
) -> None:
    edge = await make_edge(ScriptedReplica(script=says(said)), served={"tool_call_parser": parser})

    for length in range(1, len(said) + 1):
        message, reason = await both(edge, tools=[NOW, WEATHER], tool_choice=choice, max_tokens=length)

        assert (message["content"], reason) == (None, "length"), said[:length]
        calls = [call["function"]["name"] for call in message.get("tool_calls", [])]
        assert calls == ["now"] * (said[:length].count('now"')), said[:length]


async def test_a_call_cut_off_within_its_end_marker_leaves_no_text(make_edge) -> None:
    said = f"Hm.<tool_call>{SAID}</tool_call>"
    edge = await make_edge(ScriptedReplica(script=says(said)), served=HERMES)

    message, reason = await both(edge, tools=[WEATHER], max_tokens=len(said) - 3)

    assert (message["content"], reason) == ("Hm.", "length")


@pytest.mark.parametrize(
    ("choice", "reason"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "weather"}}, "stop")],
)
@pytest.mark.parametrize("parser", [None, "hermes", "llama3_json", "mistral", "json"])
async def test_a_call_that_is_demanded_matches_its_schema(
    make_edge, byte_vocabulary, engine_replica, choice: Any, reason: str, parser: str | None
) -> None:
    replica = engine_replica.EngineReplica(byte_vocabulary)
    edge = await make_edge(replica, served={"tool_call_parser": parser})
    fields = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 3000, "parallel_tool_calls": False}
    answer = asyncio.create_task(both(edge, **fields))
    while not answer.done():
        replica.step()
        await asyncio.sleep(0.001)

    message, found = await answer

    (call,) = message["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["city"] in ("Bonn", "Rome")
    assert 1 <= arguments["days"] <= 9
    assert (message["content"], found) == (None, reason)


async def test_a_strict_tool_matches_its_schema_where_the_model_is_free(
    make_edge, byte_vocabulary, engine_replica
) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    edge = await make_edge(ScriptedReplica(), served=HERMES)

    await edge.chat(tools=[strict], max_tokens=1)

    compiler = engine_replica.EngineReplica(byte_vocabulary).grammars
    matcher = compiler.matcher(edge.replica.submits[0].params.grammar)
    for byte in b'Hm. <tool_call>\n{"name": "weather", "arguments": {"city": "':
        matcher.accept(byte)
    assert {i for i in range(256) if matcher.mask()[i // 8] >> i % 8 & 1} == {ord("B"), ord("R")}


async def test_json_may_be_asked_for_beside_tools(make_edge, byte_vocabulary, engine_replica) -> None:
    edge = await make_edge(ScriptedReplica(), served=HERMES)

    await edge.chat(tools=[NOW], response_format={"type": "json_object"}, max_tokens=1)

    compiler = engine_replica.EngineReplica(byte_vocabulary).grammars
    for text in ('{"a": 1}', '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'):
        matcher = compiler.matcher(edge.replica.submits[0].params.grammar)
        for byte in text.encode():
            matcher.accept(byte)
        assert matcher.is_accepting


async def test_a_bad_schema_of_a_tool_is_refused(make_edge) -> None:
    edge = await make_edge(ScriptedReplica())
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}

    answer = await edge.chat(tools=[tool], tool_choice="required")

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools[0].function.parameters")
    assert answer.json()["error"]["message"] == (
        'tools[0].function.parameters: Unimplemented keys: ["uniqueItems"]'
    )


async def test_only_allowed_tools_are_shown_and_called(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=says(f"<tool_call>{SAID}</tool_call>")), served=HERMES)
    named = [{"type": "function", "function": {"name": "now"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": named}}

    message, reason = await both(edge, tools=[WEATHER, NOW], tool_choice=choice, max_tokens=200)

    assert "tool_calls" not in message
    assert reason == "stop"
    assert "Weather" not in shown(edge.replica.submits[0])


async def test_calls_and_results_given_back_reach_the_template(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=says("ok")), served=HERMES)
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city":"Bonn"}'},
    }

    answer = await edge.chat(
        messages=[
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        ],
        max_tokens=3,
    )

    assert answer.status_code == 200
    assert shown(edge.replica.submits[0]) == 'user:?;assistant:weather{"city": "Bonn"};tool:rain;assistant:'


async def test_a_template_that_knows_no_tools_has_them_told_in_words(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=says(SAID)))
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}

    message, reason = await both(
        edge,
        tools=[WEATHER],
        messages=[
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        ],
        max_tokens=200,
    )

    prompt = shown(edge.replica.submits[0])
    assert prompt.startswith("system\nBe kind.\n\nYou can call functions")
    assert '"description": "Weather of a city"' in prompt
    assert '{"name": "weather", "arguments": {}}' in prompt
    assert "Result of the call: rain" in prompt
    assert (message["tool_calls"][0]["function"]["name"], reason) == ("weather", "tool_calls")


async def test_models_may_be_kept_from_deciding(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(), served={"enable_auto_tool_choice": False})

    refused = await edge.chat(tools=[NOW])
    demanded = await edge.chat(tools=[NOW], tool_choice="required", max_tokens=1)

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")
    assert demanded.status_code == 200


async def test_ids_have_the_length_that_mistrals_templates_want(make_edge) -> None:
    edge = await make_edge(
        ScriptedReplica(script=says(f"[TOOL_CALLS][{SAID}]")), served={"tool_call_parser": "mistral"}
    )

    whole = await edge.chat(tools=[WEATHER], max_tokens=200)

    assert len(whole.json()["choices"][0]["message"]["tool_calls"][0]["id"]) == 9


# Thinking


async def test_thinking_is_no_content(make_edge) -> None:
    edge = await make_edge(
        ScriptedReplica(script=says("<think>\nhm\n</think>\n\nYes")), served={"reasoning_parser": "qwen3"}
    )

    message, _ = await both(edge, max_tokens=90)
    without, _ = await both(edge, max_tokens=90, include_reasoning=False)

    assert (message["reasoning_content"], message["content"]) == ("hm", "Yes")
    assert "reasoning_content" not in without


async def test_a_grammar_waits_until_thinking_is_over(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(), served={**HERMES, "reasoning_parser": "qwen3"})
    json_object = {"type": "json_object"}

    await edge.chat(response_format=json_object, max_tokens=1)
    await edge.chat(response_format=json_object, max_tokens=1, chat_template_kwargs={"thinks": True})
    await edge.chat(max_tokens=1, thinking_token_budget=5)
    await edge.chat(max_tokens=1)

    ends = [bytes(submit.params.thinking_end) for submit in edge.replica.submits]
    assert ends == [b"</think>", b"</think>", b"</think>", b""]
    assert edge.replica.submits[2].params.thinking_budget == 5


async def test_thinking_that_the_prompt_began_is_thinking(make_edge) -> None:
    edge = await make_edge(
        ScriptedReplica(script=says("hm</think>Yes")), served={**HERMES, "reasoning_parser": "qwen3"}
    )

    message, _ = await both(edge, max_tokens=90, chat_template_kwargs={"thinks": True})

    assert (message["reasoning_content"], message["content"]) == ("hm", "Yes")


async def test_thinking_ends_within_its_budget(make_edge, byte_vocabulary, engine_replica) -> None:
    replica = engine_replica.EngineReplica(byte_vocabulary)
    edge = await make_edge(replica, served={"reasoning_parser": "deepseek_r1"})
    answer = asyncio.create_task(
        edge.chat(
            max_tokens=200, thinking_token_budget=20, guided_choice=["yes", "no"], seed=3, ignore_eos=True
        )
    )
    while not answer.done():
        replica.step()
        await asyncio.sleep(0.001)

    choice = (await answer).json()["choices"][0]

    assert choice["message"]["content"] in ("yes", "no")
    assert choice["finish_reason"] == "stop"
    assert len(choice["message"]["reasoning_content"]) <= 20


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}], ids=str)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs.json"),
        ({"guided_choice": ["a"]}, "guided_choice"),
    ],
    ids=str,
)
async def test_a_form_that_a_demanded_call_cannot_have_is_refused(
    make_edge, choice: Any, fields: dict[str, Any], param: str
) -> None:
    edge = await make_edge(ScriptedReplica())

    refused = await edge.chat(tools=[NOW], tool_choice=choice, **fields)
    of_text = await edge.chat(
        tools=[NOW], tool_choice=choice, response_format={"type": "json_object"}, max_tokens=1
    )

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert of_text.status_code == 200
