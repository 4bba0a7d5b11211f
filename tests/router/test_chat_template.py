"""Chat templates: variables, continued messages, parts, and ends to what never ends."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from router.scripted_replica import ScriptedReplica
from router.text.chat_template import ChatTemplate, TemplateOptions
from workers.engine.errors import InvalidRequest

USER = {"role": "user", "content": "hi"}
PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def rendered(source: str, *messages: dict[str, Any], **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages or [USER], TemplateOptions(**options))


def test_variables_of_its_own_and_special_tokens_reach_it() -> None:
    assert (
        rendered("{{ bos_token }}{{ mood }}{{ strange is defined }}", kwargs={"mood": "calm"})
        == "<s>calmFalse"
    )


def test_messages_cannot_be_replaced_by_a_variable() -> None:
    assert rendered("{{ messages[0].content }}", kwargs={"messages": []}) == "hi"


def test_a_final_message_is_continued_where_it_ends() -> None:
    messages = [USER, {"role": "assistant", "content": "The answer is </s> "}]

    text = rendered(PLAIN, *messages, add_generation_prompt=False, continue_final_message=True)

    assert text == "<user>hi</user><assistant>The answer is </s> "


def test_a_template_that_hides_the_final_message_cannot_continue_it() -> None:
    with pytest.raises(InvalidRequest) as caught:
        rendered("{{ messages[0].role }}", USER, continue_final_message=True)

    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ loop.index }}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for a in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_what_never_ends_is_ended(source: str) -> None:
    ticks = itertools.count()
    template = ChatTemplate(source, {}, clock=lambda: next(ticks), timeout_s=20)

    with pytest.raises(InvalidRequest, match="template"):
        template.render([USER])


def test_what_a_template_takes_is_seen_from_its_source() -> None:
    parts = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"

    assert ChatTemplate(parts, {}).takes_parts
    assert not ChatTemplate(PLAIN, {}).takes_parts
    assert not ChatTemplate(PLAIN, {}).takes_tools
    assert ChatTemplate("{{ tools }}", {}).takes_tools


async def test_parts_developers_and_options_pass_the_door(make_edge) -> None:
    source = (
        "{% for m in messages %}{{ m.role }}={% for p in m['content'] %}{{ p.text }}{% endfor %};{% endfor %}"
        "{{ reasoning_effort }}{{ mood }}{% if add_generation_prompt %}!{% endif %}{# developer #}"
    )
    edge = await make_edge(ScriptedReplica(), served={"chat_template": source})
    messages = [
        {"role": "developer", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "y"}]},
    ]

    answer = await edge.chat(
        messages=messages,
        reasoning_effort="low",
        chat_template_kwargs={"mood": "calm"},
        add_generation_prompt=False,
        max_tokens=1,
    )

    assert answer.status_code == 200
    assert bytes(edge.replica.submits[0].prompt_token_ids) == b"developer=x;user=y;lowcalm"


async def test_an_answer_is_continued(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(), served={"chat_template": PLAIN})

    await edge.chat(
        messages=[USER, {"role": "assistant", "content": "It is"}], continue_final_message=True, max_tokens=1
    )

    assert bytes(edge.replica.submits[0].prompt_token_ids) == b"<user>hi</user><assistant>It is"
