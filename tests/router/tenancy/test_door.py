"""Keys at the door: who may come in, and keys that change while the ingress runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from router.scripted_replica import ScriptedReplica
from router.tenancy.key_source import CHECK_PERIOD_S, KeySource
from router.tenancy.keys import ring_of_keys
from workers.engine.errors import InvalidRequest


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        (bearer("wrong-key"), 401),
        ({"authorization": "Basic c2stMTIzNDU2"}, 401),
        ({"authorization": "Bearer "}, 401),
        (bearer("sk-123456"), 200),
        ({"authorization": "bearer sk-123456"}, 200),
        (bearer("sk-second"), 200),
    ],
)
async def test_a_key_opens_the_api(make_edge, headers: dict[str, str], status: int) -> None:
    edge = await make_edge(ScriptedReplica(), keys=ring_of_keys(["sk-123456", "sk-second"]))

    answers = [
        await edge.client.get("/v1/models", headers=headers),
        await edge.client.post("/tokenize", headers=headers, json={"prompt": "a"}),
        await edge.client.post(
            "/v1/completions", headers=headers, json={"model": "tiny", "prompt": "a", "max_tokens": 1}
        ),
    ]

    assert [answer.status_code for answer in answers] == [status] * 3
    if status == 401:
        error = answers[0].json()["error"]
        assert (error["code"], error["param"]) == ("invalid_api_key", None)
        assert answers[0].headers["www-authenticate"].startswith("Bearer")
        assert answers[0].headers["x-request-id"]
        assert not edge.replica.submits


async def test_health_asks_for_no_key_and_metrics_for_an_admins(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(), keys=ring_of_keys(["sk-admin-1", "sk-second"]))

    assert (await edge.client.get("/health")).status_code == 200
    assert (await edge.client.get("/version")).status_code == 200
    assert (await edge.client.get("/metrics")).status_code == 401
    assert (await edge.client.get("/metrics", headers=bearer("sk-second"))).status_code == 403
    assert (await edge.client.get("/metrics", headers=bearer("sk-admin-1"))).status_code == 200


async def test_a_browser_may_ask_what_it_may_send_without_a_key(make_edge) -> None:
    edge = await make_edge(keys=ring_of_keys(["sk-123456"]))

    asked = await edge.client.options(
        "/v1/models", headers={"origin": "https://page.example", "access-control-request-method": "GET"}
    )

    assert asked.status_code == 200


def replace(path: Path, text: str) -> None:
    other = path.with_suffix(".new")
    other.write_text(text)
    os.replace(other, path)


def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("sk-first\n# a note\nsk-second\n")
    now_s = 0.0
    source = KeySource(ring_of_keys(["sk-flag"]), path, lambda: now_s)

    def valid() -> list[str]:
        ring = source.ring()
        assert ring is not None
        return [key for key in ("sk-flag", "sk-first", "sk-second", "sk-third") if ring.find(key)]

    assert valid() == ["sk-flag", "sk-first", "sk-second"]
    replace(path, "sk-third\n")
    assert "sk-third" not in valid()  # not looked at yet
    now_s += CHECK_PERIOD_S
    assert valid() == ["sk-flag", "sk-third"]
    replace(path, "keys: 3\n")
    now_s += CHECK_PERIOD_S
    assert valid() == ["sk-flag", "sk-third"]
    path.unlink()
    now_s += CHECK_PERIOD_S
    assert valid() == ["sk-flag", "sk-third"]


def test_a_file_that_is_wrong_from_the_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        KeySource(None, tmp_path / "none", lambda: 0.0)
