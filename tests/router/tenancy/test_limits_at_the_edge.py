"""Limits, priorities and salts of keys as HTTP callers meet them."""

from __future__ import annotations

from typing import Any

import pytest

from router.scripted_replica import ScriptedReplica
from router.tenancy.keys import KeyRing, Tenant, digest_of


def tenant(name: str, **rights: Any) -> Tenant:
    return Tenant(name, digest_of(f"sk-{name}"), cache_salt=rights.pop("cache_salt", name), **rights)


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer sk-{name}"}


async def ask(edge: Any, name: str, **fields: Any) -> Any:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4, **fields}
    return await edge.client.post("/v1/completions", json=body, headers=key(name))


@pytest.fixture
async def edge(make_edge: Any) -> Any:
    ring = KeyRing(
        [
            tenant("rare", requests_per_minute=1),
            tenant("counted", requests_per_minute=10, tokens_per_minute=100),
            tenant("other-model", models=frozenset({"big"})),
            tenant("vip", priority=-5),
            tenant("ops", is_admin=True),
        ]
    )
    return await make_edge(ScriptedReplica(), keys=ring)


async def test_a_limit_is_answered_with_429_and_when_to_come_again(edge: Any) -> None:
    assert (await ask(edge, "rare")).status_code == 200

    refused = await ask(edge, "rare")

    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 61
    assert (await ask(edge, "vip")).status_code == 200  # others are not hurt


async def test_answers_say_what_is_left_of_the_keys_own_limits(edge: Any) -> None:
    await ask(edge, "counted")
    headers = (await ask(edge, "counted")).headers

    told = {name.removeprefix("x-ratelimit-"): headers[name] for name in headers if "ratelimit" in name}
    resets = [told.pop(f"reset-{what}") for what in ("requests", "tokens")]
    assert told == {
        "limit-requests": "10",
        "remaining-requests": "8",
        "limit-tokens": "100",
        "remaining-tokens": str(100 - 2 * 5 - 4),  # both prompts, and the output that had ended by then
    }
    assert all(59_000 < int(reset.removesuffix("ms")) <= 61_000 for reset in resets)


async def test_who_shows_no_key_is_told_of_no_limits(edge: Any) -> None:
    refused = await edge.client.get("/v1/models")

    assert refused.status_code == 401
    assert not [name for name in refused.headers if "ratelimit" in name]


async def test_a_key_for_another_model_is_refused(edge: Any) -> None:
    refused = await ask(edge, "other-model")

    assert refused.status_code == 403
    assert refused.json()["error"]["param"] == "model"
    listed = {
        name: [
            model["id"] for model in (await edge.client.get("/v1/models", headers=key(name))).json()["data"]
        ]
        for name in ("vip", "other-model")
    }
    assert listed == {"vip": ["tiny", "alias"], "other-model": []}


async def test_priority_and_salt_reach_the_replica(edge: Any) -> None:
    prompt = "x" * 64
    for name in ("vip", "rare"):
        await ask(edge, name, prompt=prompt)
    vip, rare = edge.replica.submits[-2:]

    assert (vip.priority, vip.tenant, rare.tenant) == (-5, "vip", "rare")
    assert vip.prompt_token_ids == rare.prompt_token_ids
    assert vip.block_hashes
    assert not {vip.block_hashes[i : i + 16] for i in range(0, len(vip.block_hashes), 16)} & {
        rare.block_hashes[i : i + 16] for i in range(0, len(rare.block_hashes), 16)
    }


async def test_usage_shows_in_the_metrics_for_admins_only(edge: Any) -> None:
    await ask(edge, "vip")

    assert (await edge.client.get("/metrics", headers=key("vip"))).status_code == 403
    lines = (await edge.client.get("/metrics", headers=key("ops"))).text.splitlines()
    assert 'shoal_tenant_requests_total{model="tiny",tenant="vip"} 1.0' in lines
    assert 'shoal_tenant_tokens_total{kind="prompt",model="tiny",tenant="vip"} 5.0' in lines
