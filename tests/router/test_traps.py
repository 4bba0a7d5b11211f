"""What public reports say of other routers, a test each: counters that leak, load counted late, affinity that one
replica switches off for all, indexes without bound, replicas that come and go faster than they are noticed."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import pytest

from cluster.config import application_name
from cluster.proto import shoal_pb2 as pb
from router.config import Timeouts
from router.journal import Journal, Loss, Prompt
from router.membership import Membership
from router.placement.candidate import Candidate
from router.placement.policy import POLICIES, PrefixPolicy
from router.placement.replica_view import ReplicaShape, ReplicaView
from router.scripted_replica import ScriptedReplica
from workers.engine.request import ChoiceParams

KEY = b"k" * 16


def replica(name: str, num_queued_tokens: int = 0) -> ReplicaView:
    view = ReplicaView(name, ReplicaShape(max_model_len=4096))
    if num_queued_tokens:
        view.book("before", num_queued_tokens, [])
    return view


# -- counters ----------------------------------------------------------------------------------------------


async def leave(edge: Any, url: str, arrived: Any, **fields: Any) -> None:
    """Send a request, wait until it has ``arrived``, and go away as a client does that is killed."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps(
        {"model": "tiny", "prompt": "hello" * 20, "max_tokens": 64, "ignore_eos": True, **fields}
    ).encode()
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    await edge.until(arrived)
    writer.transport.abort()


def counts(edge: Any) -> dict[str, float]:
    """Whatever goes up with a request and must come down again."""
    replicas = edge.replica_set
    in_flight = edge.app.state.metrics.running.labels("tiny")._value.get()
    return {
        "at replicas": replicas.num_placed,
        "held": replicas.num_held,
        "booked": sum(view.num_booked for view in replicas.open_views),
        "unseen": sum(view.num_queued_tokens for view in replicas.open_views),
        "sinks": sum(stream.num_requests for stream in replicas.streams),
        "in flight": in_flight,
        "running in the ledger": len(edge.ingress.ledger._running),
        "admitted": sum(state.num_running for state in edge.ingress.gate._states.values()),
        "at the replica": sum(one.num_running for one in edge.replicas),
    }


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 4}, {"n": 4, "stream": True}], ids=str)
@pytest.mark.parametrize("num_steps", [0, 1, 3], ids=["queued", "after its first token", "decoding"])
async def test_nothing_is_left_of_a_request_whose_client_has_gone(
    make_edge, fields: dict[str, Any], num_steps: int
) -> None:
    edge = await make_edge(ScriptedReplica(step_s=None), ScriptedReplica(step_s=None))
    url = await edge.listen()
    num_choices = fields.get("n", 1)

    def has_come_so_far() -> bool:
        if sum(len(one.submits) for one in edge.replicas) < num_choices:
            return False
        nonlocal num_steps
        while num_steps:
            num_steps -= 1
            for one in edge.replicas:
                one.step()
        return True

    await leave(edge, url, has_come_so_far, **fields)

    await edge.until(lambda: not any(counts(edge).values()))


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 4}], ids=str)
async def test_nothing_is_left_of_a_request_that_waited_for_a_replica(
    make_edge, fields: dict[str, Any]
) -> None:
    edge = await make_edge()
    url = await edge.listen()

    await leave(edge, url, lambda: edge.replica_set.num_held == 1, **fields)

    await edge.until(lambda: not any(counts(edge).values()))


async def test_nothing_is_left_of_a_request_that_left_between_two_replicas(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(step_s=None))
    url = await edge.listen()

    async def lose() -> None:
        await edge.replica.until(lambda: bool(edge.replica.submits))
        await edge.replica.kill()

    losing = asyncio.create_task(lose())
    await leave(edge, url, lambda: edge.replica_set.num_held == 1, stream=True)
    await losing

    await edge.until(lambda: not any(counts(edge).values()))


# -- load --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["prefix", "least-load", "power-of-two", "consistent-hash"])
def test_a_burst_sees_itself_before_any_replica_has_reported(name: str) -> None:
    policy, views = POLICIES[name](), [replica(f"r{number}") for number in range(4)]

    for number in range(40):
        ranked = policy.rank([Candidate(view, 0) for view in views], 512, b"%016d" % number)
        ranked[0].candidate.view.book(f"request {number}", 512, [])

    assert max(view.num_booked for view in views) <= 15


def test_a_replica_that_is_not_open_changes_nothing_for_the_others() -> None:
    """Where the spread of loads is taken over all replicas, a dead one's zero or its last queue decides for all."""
    choices = []
    for num_queued_tokens in (0, 10_000_000):
        views = [replica("dead", num_queued_tokens), replica("a"), replica("b")]
        views[0].is_open = False
        candidates = [Candidate(view, 256 if view.replica_id == "b" else 0) for view in views if view.is_open]
        choices.append([one.candidate.view.replica_id for one in PrefixPolicy().rank(candidates, 300, KEY)])

    assert choices[0] == choices[1] == ["b", "a"]


def test_one_hot_replica_does_not_switch_affinity_off_for_the_others() -> None:
    views = [replica("hot", 10_000_000), *(replica(f"r{number}") for number in range(7))]
    policy = PrefixPolicy()

    for number in range(1, 8):
        candidates = [Candidate(view, 256 if view is views[number] else 0) for view in views]
        assert policy.rank(candidates, 300, KEY)[0].candidate.view is views[number]


# -- members -----------------------------------------------------------------------------------------------


async def test_quick_adds_and_removes_leave_what_was_said_last(make_edge) -> None:
    replicas = [ScriptedReplica(held_hashes=[bytes([number]) * 16]) for number in range(4)]
    membership = Membership()
    edge = await make_edge(*replicas[:0], membership=membership)
    for number, one in enumerate(replicas):
        one.replica_id = f"replica-{number}"
        await one.start()
    edge.replicas += replicas
    rng = random.Random(0)

    for _ in range(200):
        chosen = rng.sample(replicas, rng.randrange(5))
        membership.publish("", {one.replica_id: one.address for one in chosen})
        if rng.random() < 0.5:
            await asyncio.sleep(0)  # some changes are seen one by one, others together
    membership.publish("", {one.replica_id: one.address for one in replicas[:2]})

    index = edge.replica_set.index
    await edge.until(lambda: len(edge.replica_set.open_views) == 2 and index.num_hashes == 2)
    await edge.until(lambda: [one.num_attached for one in replicas] == [1, 1, 0, 0])
    assert {view.replica_id for view in edge.replica_set.open_views} == {"replica-0", "replica-1"}
    index.check()


async def test_streams_outlive_members_that_come_and_go(make_edge) -> None:
    """Whatever happens to the set of replicas, requests that have begun end with all of their tokens."""
    replicas = [ScriptedReplica(step_s=0.001) for _ in range(3)]
    edge = await make_edge(*replicas)
    everyone = {one.replica_id: one.address for one in replicas}
    streams = [
        asyncio.create_task(edge.complete(prompt=f"{number}", max_tokens=60, ignore_eos=True))
        for number in range(24)
    ]
    rng = random.Random(1)

    while not all(one.done() for one in streams):
        keep = rng.sample(list(everyone), rng.randrange(1, 4))
        edge.membership.publish("", {name: everyone[name] for name in keep})
        await asyncio.sleep(0.005)  # the pace of changes, not a wait for anything

    answers = [(await one).json() for one in streams]
    assert {one["usage"]["completion_tokens"] for one in answers} == {60}
    assert Counter(one["choices"][0]["finish_reason"] for one in answers) == {"length": 24}


async def test_an_address_that_another_model_has_taken_over_gets_no_requests(make_edge) -> None:
    stranger = ScriptedReplica(model="another")
    await stranger.start()
    group = application_name("tiny")
    membership = Membership({group: {"replica": stranger.address}})
    edge = await make_edge(
        membership=membership, served={"group": group}, timeouts=Timeouts(replica_wait_s=0.2)
    )
    edge.replicas.append(stranger)
    await stranger.until(lambda: stranger.num_greeted > 0)

    answer = await edge.complete(max_tokens=1)

    assert answer.status_code == 503
    assert stranger.submits == []


class Sink:
    """Takes outputs and losses, and does nothing with them."""

    def on_output(self, output: pb.TokenOutput) -> None: ...

    def on_loss(self, loss: Loss) -> None: ...


async def test_a_request_that_was_let_in_goes_to_replicas_that_are_long_enough_for_it(make_edge) -> None:
    """While a model is rolled out with another length, replicas of both lengths are there."""
    edge = await make_edge(ScriptedReplica(step_s=None, max_model_len=100), ScriptedReplica(step_s=None))
    journals = [
        Journal(f"r{number}", Prompt([number] * 70), ChoiceParams(max_tokens=64)) for number in range(6)
    ]

    for journal in journals:
        edge.replica_set.place(journal, Sink(), 0.0)

    assert {journal.replica_id for journal in journals} == {edge.replicas[1].replica_id}
    for journal in journals:
        edge.replica_set.withdraw(journal)
