"""Headers that ask for something are understood, or refused by name; the body's answer is not given as if they were."""

from __future__ import annotations

from typing import Any

import pytest

from router.scripted_replica import ScriptedReplica

BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/embeddings": {"input": "a"},
}


async def ask(edge: Any, path: str, *headers: tuple[str, bytes]) -> Any:
    return await edge.client.post(path, headers=list(headers), json={"model": "tiny", **BODIES[path]})


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("value", [b"a b", b"x" * 257, "é".encode(), "é".encode("latin-1"), b"a\tb"])
async def test_a_session_that_is_no_word_is_refused(make_edge, path: str, value: bytes) -> None:
    edge = await make_edge(ScriptedReplica())

    answer = await ask(edge, path, ("X-Session-Id", value))

    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "X-Session-Id")
    assert "1 to 256 printable ASCII characters" in error["message"]
    assert edge.replica.submits == []
    metrics = (await edge.client.get("/metrics")).text
    assert not [
        line for line in metrics.splitlines() if line.startswith(("shoal_requests_total", "shoal_prompt_tok"))
    ]


async def test_a_session_that_comes_twice_is_refused(make_edge) -> None:
    edge = await make_edge(ScriptedReplica())

    answer = await ask(edge, "/v1/completions", ("X-Session-Id", b"a"), ("X-Session-Id", b"b"))

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Session-Id")


@pytest.mark.parametrize(
    ("value", "is_explained"),
    [(b"1", True), (b"true", True), (b"TRUE", True), (b"0", False), (b"False", False), (b"", False)],
)
async def test_an_explanation_is_given_where_it_is_asked_for(
    make_edge, value: bytes, is_explained: bool
) -> None:
    edge = await make_edge(ScriptedReplica())

    answer = await ask(edge, "/v1/completions", ("X-Shoal-Explain", value))

    assert ("shoal" in answer.json()) is is_explained


@pytest.mark.parametrize("value", [b"banana", b"2", b"yes please", b"\xff"])
async def test_a_wish_that_is_neither_yes_nor_no_is_refused(make_edge, value: bytes) -> None:
    edge = await make_edge(ScriptedReplica())

    answer = await ask(edge, "/v1/completions", ("X-Shoal-Explain", value))

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Shoal-Explain")
    assert "takes 1 or 0" in answer.json()["error"]["message"]
