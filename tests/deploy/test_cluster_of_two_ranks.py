"""A replica of two ranks through real Ray: the same tokens, an end in common, and another one in its place."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator

import httpx
import psutil
import pytest

from deploy.served_cluster import ServedCluster
from workers.checkpoint.source import ModelFiles

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(600)]

PROMPT = "Once upon a time there was a"
FLAGS = ("--replicas", "1", "--max-model-len", "512", "--kv-cache-gib", "0.1", "--cpu-threads", "1")
DETECTED_S = 2.0
HANDLED_S = 1.5
"""On top, for a loaded machine to notice."""


def wait_until_ended(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Return those that run on. One that its parent has not asked for yet has ended: it holds nothing any more."""
    deadline_s = time.monotonic() + timeout_s
    while (left := [one for one in processes if runs(one)]) and time.monotonic() < deadline_s:
        psutil.wait_procs(left[:1], timeout=0.02)
    return left


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def answer(served: ServedCluster) -> str:
    body = {"model": served.model, "prompt": PROMPT, "max_tokens": 48, "temperature": 0}
    done = httpx.post(f"{served.url}/v1/completions", json=body, timeout=120)
    return str(done.json()["choices"][0]["text"])


@pytest.fixture(scope="module")
def one_ranks_text(start_cluster: Callable[..., ServedCluster], demo_model: ModelFiles) -> str:
    served = start_cluster(*FLAGS)
    served.wait_until_up()
    text = answer(served)
    served.stop()
    return text


@pytest.fixture(scope="module")
def served(start_cluster: Callable[..., ServedCluster], one_ranks_text: str) -> Iterator[ServedCluster]:
    started_s = time.monotonic()
    found = start_cluster(*FLAGS, "--tensor-parallel-size", "2")
    found.wait_until_up()
    print(f"a cluster with two ranks answers after {time.monotonic() - started_s:.1f} s")
    yield found
    assert found.stop() == 0
    assert found.runtime.processes() == []


@pytest.mark.parametrize("word", ["RankActor", "ServeReplica:model"])
def test_one_that_is_stopped_while_its_group_loads_takes_the_group_along(
    start_cluster: Callable[..., ServedCluster], one_ranks_text: str, word: str
) -> None:
    starting = start_cluster(*FLAGS, "--tensor-parallel-size", "2")
    deadline_s = time.monotonic() + 170
    while not any(starting.runtime.folder.glob("shoal-rendezvous-*")):
        assert time.monotonic() < deadline_s, "".join(starting.log)
        time.sleep(0.02)
    ranks = starting.processes("RankActor")
    assert len(ranks) == 2
    lost_s = time.monotonic()

    max(starting.processes(word), key=lambda process: process.pid).send_signal(signal.SIGSTOP)

    assert wait_until_ended(ranks, DETECTED_S + HANDLED_S) == []
    print(f"SIGSTOP of {word} amid the load: group ended after {time.monotonic() - lost_s:.2f} s")
    starting.wait_until_up()
    assert answer(starting) == one_ranks_text
    assert starting.stop() == 0


def test_a_process_that_is_stopped_before_ray_has_it_is_not_waited_for(
    start_cluster: Callable[..., ServedCluster], one_ranks_text: str
) -> None:
    """Ray itself waits for one for a minute."""
    starting = start_cluster(*FLAGS, "--tensor-parallel-size", "2", "--rank-timeout-s", "0.5")
    deadline_s = time.monotonic() + 170
    while not starting.processes("ServeReplica:model"):
        assert time.monotonic() < deadline_s, "".join(starting.log)
        time.sleep(0.02)
    (raylet,) = starting.processes("raylet/raylet")
    ours = {process.pid for process in raylet.children()}
    while not (made := [one for one in raylet.children() if one.pid not in ours]):
        assert time.monotonic() < deadline_s, "".join(starting.log)
        time.sleep(0.002)
    stopped_s = time.monotonic()

    made[0].send_signal(signal.SIGSTOP)

    while len(starting.processes("RankActor")) < 2:
        assert time.monotonic() < deadline_s, "".join(starting.log)
        time.sleep(0.02)
    taken_s = time.monotonic() - stopped_s
    print(f"SIGSTOP of a process that Ray starts: both ranks there after {taken_s:.1f} s")
    assert taken_s < 45
    starting.wait_until_up()
    assert answer(starting) == one_ranks_text
    assert starting.stop() == 0
    assert starting.runtime.processes() == []


def test_two_ranks_answer_as_one(served: ServedCluster, one_ranks_text: str) -> None:
    assert len(served.processes("RankActor")) == 2
    assert answer(served) == one_ranks_text


def test_sockets_of_ranks_stay_on_loopback(served: ServedCluster) -> None:
    pids = {process.pid for process in served.runtime.processes()}

    sockets = [one for one in psutil.net_connections("inet") if one.pid in pids and one.laddr]

    ranks = {process.pid for process in served.processes("RankActor")}
    looked_at = [one for one in sockets if one.status == psutil.CONN_LISTEN or one.pid in ranks]
    assert any(one.pid in ranks for one in looked_at)
    assert {one.laddr.ip for one in looked_at} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_rank_takes_its_group_along_and_is_replaced(
    served: ServedCluster, one_ranks_text: str, number: signal.Signals, victim: int
) -> None:
    assert answer(served) == one_ranks_text  # the group is up
    group = processes_of_group(served)
    lost_s = time.monotonic()

    group[victim].send_signal(number)

    wait_until_group_is_gone(served, group)
    ended_s = time.monotonic() - lost_s
    assert answer(served) == one_ranks_text  # waits for the replica that takes its place
    healed_s = time.monotonic() - lost_s
    print(
        f"{number.name} of rank process {victim}: group ended after {ended_s:.2f} s, answer {healed_s:.1f} s"
    )
    assert_group_is_whole(served)


@pytest.mark.parametrize("also", [(), ("workers.brain",)], ids=["alone", "with its brain"])
def test_a_replica_that_is_stopped_takes_its_group_along_and_its_stream_goes_on(
    served: ServedCluster, one_ranks_text: str, also: tuple[str, ...]
) -> None:
    """Its brain sees it, and its rank 0: one of them is enough."""
    assert answer(served) == one_ranks_text  # the group is up
    group = processes_of_group(served)
    victims = [one for word in ("ServeReplica:model", *also) for one in served.processes(word)]
    text = ""
    for piece in pieces(served):
        if not text:
            lost_s = time.monotonic()

            for victim in victims:
                victim.send_signal(signal.SIGSTOP)

            wait_until_group_is_gone(served, group)
            print(f"SIGSTOP of a replica, {also}: group ended after {time.monotonic() - lost_s:.2f} s")
        text += piece

    assert text == one_ranks_text
    print(f"its stream ended after {time.monotonic() - lost_s:.1f} s")
    assert_group_is_whole(served)


def test_a_group_that_is_stopped_as_a_whole_is_replaced_by_serve(
    served: ServedCluster, one_ranks_text: str
) -> None:
    """Nobody inside can act: Serve misses three health checks of 10 s and does not wait for it to drain."""
    assert answer(served) == one_ranks_text  # the group is up
    group = processes_of_group(served)
    stopped_s = time.monotonic()

    for process in group:
        process.send_signal(signal.SIGSTOP)

    assert wait_until_ended(group, 55) == []
    print(f"SIGSTOP of a whole group: ended after {time.monotonic() - stopped_s:.1f} s")
    assert answer(served) == one_ranks_text
    print(f"next answer after {time.monotonic() - stopped_s:.1f} s")
    assert_group_is_whole(served)


def pieces(served: ServedCluster) -> Iterator[str]:
    """The text of ``answer`` as it comes."""
    body = {"model": served.model, "prompt": PROMPT, "max_tokens": 48, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=120) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield from (choice["text"] for choice in json.loads(line[6:])["choices"])


def processes_of_group(served: ServedCluster) -> list[psutil.Process]:
    """Ranks first."""
    ranks = sorted(served.processes("RankActor"), key=lambda process: process.pid)
    group = [*ranks, *served.processes("workers.brain"), *served.processes("ServeReplica:model")]
    assert len(group) == 4
    return group


def wait_until_group_is_gone(served: ServedCluster, group: list[psutil.Process]) -> None:
    deadline_s = time.monotonic() + DETECTED_S + HANDLED_S
    assert wait_until_ended(group, DETECTED_S + HANDLED_S) == []
    # The ingress hears of it by its connection's end, a moment after the process's.
    while num_open_replicas(served) and time.monotonic() < deadline_s:
        pass
    assert num_open_replicas(served) == 0


def num_open_replicas(served: ServedCluster) -> int:
    """As the health endpoint tells it."""
    return int(httpx.get(f"{served.url}/health").json()["models"][served.model]["num_open_replicas"])


def assert_group_is_whole(served: ServedCluster) -> None:
    assert len(served.processes("RankActor")) == 2
    assert len(served.processes("workers.brain")) == 1
    meeting_places = list(served.runtime.folder.glob("shoal-rendezvous-*"))
    assert len(meeting_places) == 1  # those of lost groups are gone
