"""Every kind of channel keeps the same promises."""

from __future__ import annotations

import gc
import os
import select
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from workers.channel.link import BrainLost, connect, listen, new_endpoint
from workers.engine.errors import RankLost


def test_every_rank_receives_what_the_brain_sends_in_order(make_group) -> None:
    group = make_group(3)

    for number in range(50):
        group.brain.broadcast(b"plan %d" % number)

    for rank in group.ranks:
        assert [rank.receive(5.0) for _ in range(50)] == [b"plan %d" % number for number in range(50)]


def test_the_brain_receives_what_rank_0_sends(make_group) -> None:
    group = make_group(2)

    group.ranks[0].send(b"one")
    group.ranks[0].send(b"two")

    assert [group.brain.receive(5.0), group.brain.receive(5.0)] == [b"one", b"two"]


def test_a_payload_longer_than_any_buffer_arrives_whole(make_group, threads: ThreadPoolExecutor) -> None:
    group = make_group(2)
    payload = bytes(range(256)) * 20_000  # 5 MB

    received = [threads.submit(rank.receive, 20.0) for rank in group.ranks]
    group.brain.broadcast(payload)

    assert all(future.result() == payload for future in received)


def test_a_brain_and_a_rank_that_send_at_once_do_not_wait_for_each_other(
    make_group, threads: ThreadPoolExecutor
) -> None:
    group = make_group(2)
    payload = bytes(range(256)) * 20_000

    def answer_then_read() -> bytes | None:
        group.ranks[0].send(payload)
        return group.ranks[0].receive(20.0)

    received = [threads.submit(answer_then_read), threads.submit(group.ranks[1].receive, 20.0)]
    group.brain.broadcast(payload)

    assert group.brain.receive(20.0) == payload
    assert all(future.result() == payload for future in received)


def test_nothing_comes_in_time_gives_none(make_group) -> None:
    group = make_group(1)

    assert group.brain.receive(0.0) is None
    assert group.brain.receive(0.01) is None
    assert group.ranks[0].receive(0.01) is None


def test_descriptors_turn_readable_when_something_comes(make_group) -> None:
    group = make_group(1)
    poller = select.poll()
    for fd in group.brain.filenos():
        poller.register(fd, select.POLLIN)
    while group.brain.receive(0.0) is not None or poller.poll(0):
        pass

    group.ranks[0].send(b"result")

    assert poller.poll(5000)
    assert group.brain.receive(5.0) == b"result"


def test_the_brain_sees_a_rank_hang_up_after_what_it_had_sent(make_group) -> None:
    group = make_group(2)
    group.ranks[0].send(b"last words")
    assert group.brain.receive(5.0) == b"last words"

    group.ranks[1].close()

    with pytest.raises(RankLost, match="rank 1"):
        group.brain.receive(5.0)


def test_a_rank_sees_the_brain_hang_up_after_what_it_had_sent(make_group) -> None:
    group = make_group(1)
    group.brain.broadcast(b"last words")
    assert group.ranks[0].receive(5.0) == b"last words"

    group.brain.close()

    with pytest.raises(BrainLost):
        group.ranks[0].receive(5.0)


def test_ranks_that_do_not_come_are_named(endpoint: str, threads: ThreadPoolExecutor) -> None:
    brain = listen(endpoint, 3)
    present = threads.submit(connect, endpoint, 1, 5.0)

    with pytest.raises(RankLost, match=r"ranks \[0, 2\] did not connect within 0.5 s"):
        brain.wait_for_ranks(0.5)

    brain.close()
    if present.exception() is None:
        present.result().close()


def test_a_rank_without_a_brain_gives_up(endpoint: str) -> None:
    with pytest.raises(BrainLost):
        connect(endpoint, 0, 0.05)


def test_closing_twice_is_harmless(make_group) -> None:
    group = make_group(1)

    for _ in range(2):
        group.brain.close()
        group.ranks[0].close()


def test_a_stranger_on_the_unix_socket_is_turned_away(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    brain = listen(f"unix:{tmp_path}/steps", 1)
    stranger = socket.socket(socket.AF_UNIX)
    stranger.connect(f"{tmp_path}/steps")
    stranger.sendall(b"GET / HT")
    rank = threads.submit(connect, f"unix:{tmp_path}/steps", 0, 5.0)

    brain.wait_for_ranks(5.0)

    assert stranger.recv(1) == b""
    rank.result().close()
    brain.close()
    stranger.close()


def test_the_unix_socket_s_file_is_gone_once_the_ranks_are_in(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    brain = listen(f"unix:{tmp_path}/steps", 1)
    rank = threads.submit(connect, f"unix:{tmp_path}/steps", 0, 5.0)

    brain.wait_for_ranks(5.0)

    assert list(tmp_path.iterdir()) == []
    rank.result().close()
    brain.close()


def test_a_stranger_who_comes_and_goes_over_zeromq_loses_no_rank(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    endpoint = f"ipc://{tmp_path}/steps#key"
    brain = listen(endpoint, 1)
    rank = threads.submit(connect, endpoint, 0, 5.0)
    brain.wait_for_ranks(5.0)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.set(zmq.LINGER, 1000)
        stranger.connect(endpoint.partition("#")[0])
        stranger.send(b"a result of mine")

    rank.result().send(b"result")

    assert brain.receive(5.0) == b"result"
    assert brain.receive(0.2) is None
    rank.result().close()
    brain.close()


def test_new_endpoints_differ() -> None:
    assert new_endpoint("/tmp") != new_endpoint("/tmp")


def test_links_that_are_dropped_leave_no_descriptors_open(tmp_path: Path) -> None:
    def drop() -> None:
        endpoint = new_endpoint(str(tmp_path))
        brain = listen(endpoint, 2)
        with ThreadPoolExecutor(2) as pool:
            ranks = [pool.submit(connect, endpoint, rank, 10.0) for rank in range(2)]
            brain.wait_for_ranks(10.0)
            assert all(rank.result() for rank in ranks)

    drop()  # what is made once
    gc.collect()
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        drop()
        gc.collect()

    assert len(os.listdir("/proc/self/fd")) == len(before)
