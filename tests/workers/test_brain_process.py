"""The brain as a process of its own, through the replica's client."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from workers.brain_client import BrainClient, BrainConfig, BrainFailed
from workers.brain_messages import Failed, Pong, StepUpdate
from workers.channel import BrainLost, serve_steps
from workers.engine.config import EngineConfig
from workers.engine.request import ChoiceParams, EngineRequest
from workers.scripted import ScriptedExecutor, scripted_token

ENGINE = EngineConfig(max_model_len=256, num_blocks=64)


@asynccontextmanager
async def running(config: BrainConfig, num_threads: int = 0) -> AsyncIterator[BrainClient]:
    """A brain whose ranks live in threads here."""
    brain = BrainClient(config)
    with ThreadPoolExecutor(max(1, num_threads)) as threads:
        endpoint = await brain.start()
        for rank in range(num_threads):
            threads.submit(serve_steps, ScriptedExecutor(), endpoint, rank)
        await brain.started()
        try:
            yield brain
        finally:
            await brain.stop()


def make_request(**fields: Any) -> EngineRequest:
    return EngineRequest("r", [1, 2, 3], ChoiceParams(**{"max_tokens": 5, "seed": 9, **fields}))


async def first(brain: BrainClient, wanted: Callable[[Any], bool]) -> Any:
    async with asyncio.timeout(20):
        async for update in brain.updates():
            if wanted(update):
                return update
    raise AssertionError("the brain ended before it said so")


async def token_ids_of(brain: BrainClient, request: EngineRequest) -> list[int]:
    token_ids: list[int] = []
    brain.submit(request)

    def take(update: Any) -> bool:
        outputs = update.outputs if isinstance(update, StepUpdate) else []
        for output in outputs:
            token_ids.extend(output.token_ids)
        return any(output.finish_reason for output in outputs)

    await first(brain, take)
    return token_ids


async def test_a_scripted_brain_answers_and_stops_cleanly() -> None:
    async with running(BrainConfig(ENGINE, num_ranks=0)) as brain:
        assert brain.idle_load.num_free_blocks == 64
        assert await token_ids_of(brain, make_request()) == [
            scripted_token(9, 0, at, 32000) for at in range(3, 8)
        ]

    assert not brain.is_alive
    assert brain.exit_code == 0
    assert [update async for update in brain.updates()] == []


async def test_ranks_connect_over_the_step_channel_and_end_with_the_brain() -> None:
    async with running(BrainConfig(ENGINE, num_ranks=2), num_threads=2) as brain:
        assert await token_ids_of(brain, make_request()) == [
            scripted_token(9, 0, at, 32000) for at in range(3, 8)
        ]
    # leaving the block joins the ranks' threads


async def test_a_killed_brain_is_reported_as_the_last_update() -> None:
    async with running(BrainConfig(ENGINE, num_ranks=0)) as brain:
        assert brain.pid is not None
        os.kill(brain.pid, signal.SIGKILL)

        async with asyncio.timeout(10):
            updates = [update async for update in brain.updates()]

        assert updates == [Failed("the engine process ended with exit code -9")]


async def test_a_lost_rank_fails_the_brain_with_its_number() -> None:
    config = BrainConfig(ENGINE, num_ranks=1)
    brain = BrainClient(config)
    endpoint = await brain.start()
    source = (
        "import sys; from workers.channel import serve_steps; from workers.scripted import ScriptedExecutor;"
        "serve_steps(ScriptedExecutor(), sys.argv[1], 0)"
    )
    rank = await asyncio.create_subprocess_exec(sys.executable, "-c", source, endpoint)
    await brain.started()

    rank.kill()

    assert await first(brain, lambda update: isinstance(update, Failed)) == Failed("rank 0 is gone")
    await brain.stop()
    assert brain.exit_code == 1
    await rank.wait()


async def test_ranks_that_do_not_come_fail_the_start() -> None:
    brain = BrainClient(BrainConfig(ENGINE, num_ranks=2, start_timeout_s=0.2))
    await brain.start()

    with pytest.raises(BrainFailed, match=r"ranks \[0, 1\] did not connect"):
        await brain.started()

    await brain.stop()
    assert brain.exit_code == 1


async def test_a_brain_that_starts_can_be_stopped() -> None:
    brain = BrainClient(BrainConfig(ENGINE, num_ranks=1))
    endpoint = await brain.start()

    brain.kill()

    with pytest.raises(BrainFailed):
        await brain.started()
    await brain.stop()
    with pytest.raises(BrainLost):
        serve_steps(ScriptedExecutor(), endpoint, 0, connect_timeout_s=0.05)


async def test_an_idle_brain_sleeps() -> None:
    async with running(BrainConfig(ENGINE, num_ranks=1), num_threads=1) as brain:
        process = psutil.Process(brain.pid)
        await token_ids_of(brain, make_request())
        before = process.num_ctx_switches().voluntary

        await asyncio.sleep(0.3)  # the length of the measurement

        assert process.num_ctx_switches().voluntary - before <= 2
        brain.ping(1.0)
        pong = await first(brain, lambda update: isinstance(update, Pong))
        assert pong == Pong(1.0, has_work=False, num_steps=5)


REPLICA = """
import asyncio
from workers.brain_client import BrainClient, BrainConfig
from workers.engine.config import EngineConfig

async def main():
    brain = BrainClient(BrainConfig(EngineConfig(max_model_len=64, num_blocks=8), num_ranks=0, replica_stop_s=0.3))
    await brain.start()
    await brain.started()
    print(brain.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
"""A replica that does nothing but have a brain, and tells its process id."""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_brain_ends_with_a_replica_that_is_killed_or_stopped(number: signal.Signals) -> None:
    replica = subprocess.Popen([sys.executable, "-c", REPLICA], stdout=subprocess.PIPE, text=True)
    assert replica.stdout is not None
    brain = psutil.Process(int(replica.stdout.readline()))

    replica.send_signal(number)

    try:
        assert replica.wait(10) == -signal.SIGKILL  # which the brain sends to one that is stopped
    finally:
        replica.kill()
        replica.communicate()
    assert psutil.wait_procs([brain], timeout=10)[1] == []


async def test_ctrl_c_is_the_replica_s_to_decide() -> None:
    async with running(BrainConfig(ENGINE, num_ranks=0)) as brain:
        assert brain.pid is not None
        os.kill(brain.pid, signal.SIGINT)

        assert len(await token_ids_of(brain, make_request())) == 5


async def test_scripted_steps_take_their_time() -> None:
    async with running(BrainConfig(ENGINE, num_ranks=0, scripted_step_s=0.02)) as brain:
        begun_s = time.monotonic()

        await token_ids_of(brain, make_request())

        assert time.monotonic() - begun_s >= 5 * 0.02
