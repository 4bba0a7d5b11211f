"""The page at ``/ui`` in a real browser: it shows what runs, keeps itself current, and asks for an admin's key."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from pathlib import Path

import pytest

from router.scripted_replica import ScriptedReplica
from router.tenancy.keys import KeyRing, Tenant, digest_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
RING = KeyRing([Tenant("user", digest_of("sk-user-1")), Tenant("ops", digest_of("sk-ops-1"), is_admin=True)])


async def test_the_data_tell_each_replica_and_totals(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(), ScriptedReplica())
    await edge.complete(max_tokens=5)

    answer = (await edge.client.get("/ui/data")).json()

    assert answer["process"] == os.getpid()
    (model,) = answer["models"]
    assert model["name"] == "tiny"
    assert {one["id"] for one in model["replicas"]} == {"replica-0", "replica-1"}
    assert all(
        one["is_open"] and one["num_blocks"] >= one["num_used_blocks"] >= 0 for one in model["replicas"]
    )
    assert model["first_token_s"][-1] == [-1.0, 1.0]


async def test_the_page_loads_nothing_from_elsewhere(make_edge) -> None:
    edge = await make_edge(ScriptedReplica())

    answer = await edge.client.get("/ui")

    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.findall(r"(?:src|href)=|https?://", answer.text)


async def test_only_an_admins_key_opens_it_also_as_a_browsers_password(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(), keys=RING)

    for path in ("/ui", "/ui/data"):
        asked = await edge.client.get(path)
        assert asked.status_code == 401
        assert asked.headers["www-authenticate"].startswith("Basic")
        assert (await edge.client.get(path, auth=("anybody", "sk-user-1"))).status_code == 403
        assert (await edge.client.get(path, auth=("anybody", "sk-ops-1"))).status_code == 200


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)")
@pytest.mark.slow
async def test_a_browser_shows_replicas_rates_and_quantiles(make_edge, tmp_path: Path) -> None:
    edge = await make_edge(ScriptedReplica(step_s=0.01), ScriptedReplica(step_s=0.01))
    url = await edge.listen()
    work = [asyncio.create_task(edge.complete(max_tokens=400, ignore_eos=True, n=2)) for _ in range(3)]

    picture = Path(os.environ.get("SHOAL_UI_PICTURE", str(tmp_path / "ui.png")))
    arguments = [
        "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={tmp_path}/profile",
        "--window-size=1280,720", "--virtual-time-budget=6000",
    ]  # fmt: skip

    async def chromium(*more: str) -> str:
        process = await asyncio.create_subprocess_exec(
            str(CHROMIUM),
            *arguments,
            *more,
            f"{url}/ui",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        out, _ = await asyncio.wait_for(process.communicate(), 60)
        return out.decode()

    document = (await chromium("--dump-dom")).partition("<script>")[0]
    await chromium(f"--screenshot={picture}")
    for task in work:
        task.cancel()
    await asyncio.gather(*work, return_exceptions=True)

    assert '<span id="state" role="status" class="">live</span>' in document
    assert document.count("<tr data-replica") == 2
    assert "2 of 2 replicas open" in document
    values = dict(re.findall(r'data-card="tiny/(\w+)".*?<div class="value">(.*?)</div>', document))
    assert set(values) == {"speed", "running", "queue", "ttft", "gap"}
    assert "NaN" not in document
    assert "undefined" not in document
    assert os.path.getsize(picture) > 10_000  # noqa: ASYNC240  # once, at the end
