"""What becomes of each field that the official client knows: it works, changes nothing, or is refused by name.

The fields come from the ``openai`` package's own types; a new one fails here until somebody decides what becomes
of it. ``python tests/router/test_conformance.py`` writes the table in ``deploy/docs/openai.md`` anew.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from cluster.wire import request_from_wire
from router.scripted_replica import ScriptedReplica

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "deploy" / "docs" / "openai.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"

WORKS, NO_EFFECT, REFUSED = "works", "no effect", "refused"


@dataclass(frozen=True)
class Field:
    """One field: what becomes of it, and a value to try."""

    state: str
    value: Any
    shown_by: str = ""
    """The test that shows what it does; empty: the one below, by what reaches the engine."""
    reaches: str = ""
    """The engine's parameter that must hold the value then."""
    others: dict[str, Any] | None = None
    """Further fields that it needs."""
    refuses: Any = None
    """A value that is refused all the same."""


def works(value: Any, shown_by: str = "", reaches: str = "", **others: Any) -> Field:
    return Field(WORKS, value, shown_by, reaches, others)


def no_effect(value: Any, refuses: Any = None) -> Field:
    return Field(NO_EFFECT, value, refuses=refuses)


def refused(value: Any) -> Field:
    return Field(REFUSED, value)


USER = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

SAMPLING = {
    "frequency_penalty": works(0.5, reaches="frequency_penalty"),
    "presence_penalty": works(0.5, reaches="presence_penalty"),
    "logit_bias": works({"5": 1.0}, reaches="logit_bias"),
    "temperature": works(0.5, reaches="temperature"),
    "top_p": works(0.5, reaches="top_p"),
    "seed": works(3, reaches="seed"),
    "max_tokens": works(7, reaches="max_tokens"),
    "n": works(2, "test_completions.py::test_choices_of_each_prompt_stand_together"),
    "stop": works(["x"], "test_chat.py::test_a_stop_string_ends_the_request_and_later_tokens_are_not_billed"),
    "stream_options": works(
        {"include_usage": True}, "test_chat.py::test_usage_comes_last_and_is_null_before", stream=True
    ),
    "user": no_effect("me"),
}
CACHING = {
    "metadata": no_effect({"a": "b"}),
    "prompt_cache_key": works("k", "test_affinity.py::test_requests_of_one_session_gather"),
    "prompt_cache_options": no_effect({}),
    "prompt_cache_retention": no_effect("24h"),
    "safety_identifier": no_effect("s"),
    "service_tier": no_effect("auto"),
    "store": no_effect(True),
}
CHAT = {
    **SAMPLING,
    **CACHING,
    "model": works("tiny", "test_bad_input.py::test_a_model_answers_to_all_of_its_names"),
    "messages": works(USER, "test_chat.py::test_contents_in_parts_and_developer_messages_reach_the_template"),
    "max_completion_tokens": works(7, reaches="max_tokens"),
    "logprobs": works(True, "test_chat.py::test_logprobs_have_tokens_and_bytes"),
    "top_logprobs": works(2, "test_chat.py::test_logprobs_have_tokens_and_bytes", logprobs=True),
    "response_format": works({"type": "json_object"}, "test_structured.py::test_each_form_becomes_a_grammar"),
    "modalities": no_effect(["text"], refuses=["audio"]),
    "prediction": no_effect({"type": "content", "content": "x"}),
    "verbosity": no_effect("low"),
    "tools": works([TOOL], "test_tools.py::test_a_call_in_the_models_own_words_is_a_call"),
    "tool_choice": works(
        "required", "test_tools.py::test_a_call_that_is_demanded_matches_its_schema", tools=[TOOL]
    ),
    "parallel_tool_calls": works(
        False, "test_tools.py::test_a_call_that_is_demanded_matches_its_schema", tools=[TOOL]
    ),
    "reasoning_effort": works(
        "low", "test_chat_template.py::test_parts_developers_and_options_pass_the_door"
    ),
    "audio": refused({"voice": "a", "format": "wav"}),
    "function_call": refused("auto"),
    "functions": refused([{"name": "f"}]),
    "moderation": refused({}),
    "web_search_options": refused({}),
}
COMPLETIONS = {
    **SAMPLING,
    "model": works("tiny", "test_bad_input.py::test_a_model_answers_to_all_of_its_names"),
    "prompt": works(["a", "b"], "test_completions.py::test_a_prompt_of_any_form_is_completed"),
    "echo": works(True, "test_completions.py::test_an_echo_comes_first_streamed_or_not"),
    "logprobs": works(2, "test_completions.py::test_logprobs_count_characters"),
    "best_of": works(3, "test_completions.py::test_the_best_of_several_is_given"),
    "suffix": refused("x"),
}
EMBEDDINGS = {
    "model": works("tiny", "test_bad_input.py::test_a_model_answers_to_all_of_its_names"),
    "input": works(["a", "b"], "test_embeddings.py::test_lists_keep_their_order"),
    "encoding_format": works("base64", "test_embeddings.py::test_base64_holds_the_same_numbers"),
    "dimensions": works(
        2, "test_embeddings.py::test_fewer_dimensions_are_the_leading_ones_brought_to_length_one"
    ),
    "user": no_effect("me"),
}
RESPONSES_TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
RESPONSES = {
    **CACHING,
    "metadata": works({"a": "b"}, "test_responses.py::test_the_official_client_gets_an_answer"),
    "model": works("tiny", "test_bad_input.py::test_a_model_answers_to_all_of_its_names"),
    "input": works("hi", "test_responses.py::test_earlier_items_are_the_conversation"),
    "instructions": works("Be brief.", "test_responses.py::test_the_official_client_gets_an_answer"),
    "max_output_tokens": works(7, reaches="max_tokens"),
    "temperature": works(0.5, reaches="temperature"),
    "top_p": works(0.5, reaches="top_p"),
    "include": works(
        ["message.output_text.logprobs"], "test_responses.py::test_logprobs_come_where_included"
    ),
    "top_logprobs": works(
        2, "test_responses.py::test_logprobs_come_where_included", include=["message.output_text.logprobs"]
    ),
    "truncation": works(
        "auto", "test_responses.py::test_a_long_conversation_loses_its_oldest_messages_where_that_is_allowed"
    ),
    "text": works({"format": {"type": "json_object"}}, "test_responses.py::test_a_schema_is_enforced"),
    "reasoning": works({"effort": "low"}, "test_responses.py::test_effort_is_told_to_the_template"),
    "tools": works([RESPONSES_TOOL], "test_responses.py::test_a_call_is_an_item_of_its_own_streamed_or_not"),
    "tool_choice": works(
        "required", "test_responses.py::test_a_call_that_is_demanded_is_enforced", tools=[RESPONSES_TOOL]
    ),
    "parallel_tool_calls": works(
        False, "test_tools.py::test_a_call_that_is_demanded_matches_its_schema", tools=[RESPONSES_TOOL]
    ),
    "background": no_effect(False, refuses=True),
    "max_tool_calls": no_effect(3),
    "stream_options": no_effect({"include_obfuscation": False}),
    "user": no_effect("me"),
    "previous_response_id": refused("resp_1"),
    "conversation": refused("conv_1"),
    "prompt": refused({"id": "p"}),
    "access_programs": refused({}),
    "background_options": refused({}),
    "context_management": refused([]),
    "image": refused({}),
    "moderation": refused({}),
}


@dataclass(frozen=True)
class Endpoint:
    """A path, the client's type of its parameters, a body that is enough, and our verdicts."""

    path: str
    params: type
    body: dict[str, Any]
    fields: dict[str, Field]


ENDPOINTS = (
    Endpoint("/v1/chat/completions", chat_create_params.CompletionCreateParamsBase, {"messages": USER}, CHAT),
    Endpoint(
        "/v1/completions", completion_create_params.CompletionCreateParamsBase, {"prompt": "a"}, COMPLETIONS
    ),
    Endpoint("/v1/embeddings", embedding_create_params.EmbeddingCreateParams, {"input": "a"}, EMBEDDINGS),
    Endpoint("/v1/responses", response_create_params.ResponseCreateParamsBase, {"input": "a"}, RESPONSES),
)
CASES = [(one, name, field) for one in ENDPOINTS for name, field in one.fields.items()]


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=[one.path for one in ENDPOINTS])
def test_every_field_of_the_client_has_its_verdict(endpoint: Endpoint) -> None:
    assert set(endpoint.fields) == set(endpoint.params.__annotations__)


@pytest.mark.parametrize(
    ("endpoint", "name", "field"), CASES, ids=[f"{one.path}-{name}" for one, name, _ in CASES]
)
async def test_a_field_does_what_the_table_says(
    make_edge, endpoint: Endpoint, name: str, field: Field
) -> None:
    edge = await make_edge(ScriptedReplica())

    async def send(**fields: Any) -> Any:
        body = {"model": "tiny", **endpoint.body, **(field.others or {}), **fields}
        limit = {"/v1/embeddings": {}, "/v1/responses": {"max_output_tokens": 1}}.get(
            endpoint.path, {"max_tokens": 1}
        )
        if "tokens" in name:
            limit = {}
        return await edge.client.post(endpoint.path, json={**limit, **body})

    wrong = field.value if field.state == REFUSED else field.refuses
    if wrong is not None:
        refusal = await send(**{name: wrong})
        error = refusal.json()["error"]
        assert refusal.status_code == 400
        assert re.split(r"[.\[]", error["param"])[0] == name
        assert error["message"]
    if field.state == REFUSED:
        return
    answer = await send(**{name: field.value})
    assert answer.status_code == 200, answer.text
    if field.state == NO_EFFECT:
        without = await send()
        first, second = edge.replica.submits
        assert (first.prompt_token_ids, first.params.max_tokens) == (
            second.prompt_token_ids,
            second.params.max_tokens,
        )
        assert set(answer.json()) == set(without.json())
    if field.reaches:
        params = request_from_wire(edge.replica.submits[0], "r").params
        wanted = {5: 1.0} if name == "logit_bias" else field.value
        assert getattr(params, field.reaches) == wanted


@pytest.mark.parametrize("shown_by", sorted({field.shown_by for *_, field in CASES if field.shown_by}))
def test_the_tests_that_the_table_names_are_there(shown_by: str) -> None:
    file, _, name = shown_by.partition("::")

    assert f"def {name}(" in (ROOT / "tests" / "router" / file).read_text()


def table() -> str:
    """The verdicts as Markdown."""
    lines = [f"Fields of the `openai` package {version('openai')}.", ""]
    here = "test_conformance.py::test_a_field_does_what_the_table_says"
    for endpoint in ENDPOINTS:
        lines += [
            f"### `POST {endpoint.path}`",
            "",
            "| field | | shown by (`tests/router/`) |",
            "| --- | --- | --- |",
        ]
        for name, field in sorted(
            endpoint.fields.items(), key=lambda item: (item[1].state != WORKS, item[0])
        ):
            but = "" if field.refuses is None else f"; `{json.dumps(field.refuses)}` is refused"
            lines.append(f"| `{name}` | {field.state}{but} | `{field.shown_by or here}` |")
        lines.append("")
    return "\n".join(lines)


def test_the_page_holds_the_table() -> None:
    written = PAGE.read_text().split(BEGIN)[1].split(END)[0].strip()

    def without_version(text: str) -> str:
        return text.strip().split("\n", 1)[1]

    assert without_version(written) == without_version(table()), (
        f"run python {Path(__file__).relative_to(ROOT)}"
    )


def write_page() -> None:
    """Put the table as it is now into the page."""
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    write_page()
