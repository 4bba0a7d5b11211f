"""Streams to replicas: placing, cancelling, losing, coming back."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from dataclasses import dataclass, field

import pytest

from cluster.proto import shoal_pb2 as pb
from cluster.wire import request_from_wire
from router.config import Limits, Timeouts
from router.journal import Journal, Loss, Prompt
from router.membership import Membership, StaticMembership
from router.scripted_replica import ScriptedReplica
from workers.engine.block_hash import hash_blocks
from workers.engine.errors import Overloaded, ReplicaLost
from workers.engine.request import ChoiceParams


@dataclass
class Recorder:
    """A sink that keeps what it is told."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    loss: Loss | None = None

    def on_output(self, output: pb.TokenOutput) -> None:
        self.token_ids += output.token_ids
        self.finish_reason = output.finish_reason

    def on_loss(self, loss: Loss) -> None:
        self.loss = loss


def journal(request_id: str = "r", num_tokens: int = 64, max_tokens: int = 8) -> Journal:
    return Journal(
        request_id, Prompt([i % 250 for i in range(num_tokens)]), ChoiceParams(max_tokens=max_tokens)
    )


async def test_outputs_reach_the_request_they_belong_to(make_edge) -> None:
    edge = await make_edge(ScriptedReplica())
    sinks = [Recorder(), Recorder()]
    journals = [journal("a", max_tokens=3), journal("b", max_tokens=5)]

    for sink, one in zip(sinks, journals, strict=True):
        edge.replica_set.place(one, sink, 0.0)
    await edge.until(lambda: all(sink.finish_reason for sink in sinks))

    assert [len(sink.token_ids) for sink in sinks] == [3, 5]
    for one in journals:
        edge.replica_set.withdraw(one)
    assert edge.replica.cancelled_ids == []


async def test_what_is_submitted_carries_hashes_and_all_parameters(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(step_s=None))
    params = ChoiceParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_k=4,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={5: -1.0},
        seed=2**64 - 1,
        choice_index=3,
        stop_token_ids=(7,),
        ignore_eos=True,
        num_logprobs=0,
        pooling="last",
    )
    one = Journal("r", Prompt(list(range(40))), params)

    edge.replica_set.place(one, Recorder(), 0.0)
    await edge.replica.until(lambda: bool(edge.replica.submits))

    (submit,) = edge.replica.submits
    assert submit.block_hashes == b"".join(hash_blocks(list(range(40)), 16, b"scripted"))
    assert submit.hash_root == b"scripted"
    assert request_from_wire(submit, "r").params == params
    edge.replica_set.withdraw(one)


async def test_a_withdrawn_request_is_cancelled_at_its_replica(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(step_s=None))
    one = journal()
    edge.replica_set.place(one, Recorder(), 0.0)

    edge.replica_set.withdraw(one)
    edge.replica_set.withdraw(one)

    await edge.replica.until(lambda: edge.replica.cancelled_ids == ["r"])
    (view,) = edge.replica_set.open_views
    assert (view.num_booked, view.num_queued_tokens) == (0, 0)


async def test_siblings_gather_where_the_first_is_booked(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(step_s=None), ScriptedReplica(step_s=None))
    first, second = journal("a", 256), journal("b", 256)

    edge.replica_set.place(first, Recorder(), 0.0)
    edge.replica_set.place(second, Recorder(), 0.0)

    assert first.replica_id == second.replica_id
    assert edge.replica_set.counts.num_hit_tokens == 256
    for one in (first, second):
        edge.replica_set.withdraw(one)


async def test_a_request_goes_where_its_prefix_is(make_edge) -> None:
    hashes = hash_blocks([i % 250 for i in range(512)], 16, b"scripted")
    edge = await make_edge(ScriptedReplica(step_s=None), ScriptedReplica(step_s=None, held_hashes=hashes))
    await edge.until(lambda: edge.replica_set.index.num_hashes == len(hashes))
    one = journal("a", 512)

    edge.replica_set.place(one, Recorder(), 0.0)

    assert one.replica_id == "replica-1"
    edge.replica_set.withdraw(one)


async def test_cache_events_keep_the_index_and_a_gap_brings_a_snapshot(make_edge) -> None:
    replica = ScriptedReplica(step_s=None)
    edge = await make_edge(replica)
    index = edge.replica_set.index
    hashes = hash_blocks(list(range(64)), 16, b"scripted")

    replica.send_cache(hashes[:3])
    await edge.until(lambda: index.num_hashes == 3)
    replica.send_cache([], hashes[2:3])
    await edge.until(lambda: index.num_hashes == 2)

    replica.held_hashes = hashes
    replica.send_cache(hashes[2:], skip=5)
    await edge.until(lambda: index.num_hashes == 4)
    assert replica.num_resyncs == 1


async def test_a_dead_replica_is_lost_and_joins_again(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(step_s=None, held_hashes=[b"h" * 16]))
    one, sink = journal(), Recorder()
    edge.replica_set.place(one, sink, 0.0)
    await edge.replica.until(lambda: bool(edge.replica.submits))

    await edge.replica.kill()
    await edge.until(lambda: sink.loss is Loss.BROKEN)

    assert edge.replica_set.open_views == []
    assert edge.replica_set.index.num_hashes == 0
    with pytest.raises(ReplicaLost):
        edge.replica_set.place(journal("b"), sink, 0.0)
    edge.replica_set.withdraw(one)

    await edge.replica.start()
    await edge.until(lambda: edge.replica_set.index.num_hashes == 1)


async def test_a_replica_whose_steps_stop_is_lost(make_edge, caplog) -> None:
    edge = await make_edge(ScriptedReplica(step_s=None), timeouts=Timeouts(stall_s=0.1))
    await asyncio.sleep(0.3)  # longer than the limit: without work of ours it is no stall
    assert edge.replica_set.streams[0].num_losses == 0
    one, sink = journal(), Recorder()

    edge.replica_set.place(one, sink, 0.0)
    await edge.until(lambda: sink.loss is Loss.BROKEN)

    assert "no step for" in caplog.text
    edge.replica_set.withdraw(one)


async def test_a_replica_whose_process_is_stopped_is_lost_though_its_connection_stands(make_edge) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router.scripted_replica", "--step-ms", "1"), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    address = (await process.stdout.readline()).decode().strip()
    edge = await make_edge(membership=StaticMembership({"stopped": address}), timeouts=Timeouts(ping_s=0.3))
    await edge.until(lambda: bool(edge.replica_set.open_views))

    process.send_signal(signal.SIGSTOP)

    await edge.until(lambda: not edge.replica_set.open_views)
    process.kill()
    await process.wait()


async def test_a_draining_replica_gets_no_requests_but_ends_those_it_has(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(step_s=None), ScriptedReplica(step_s=None))
    one, sink = journal(max_tokens=2), Recorder()
    edge.replica_set.place(one, sink, 0.0)
    old = next(r for r in edge.replicas if r.replica_id == one.replica_id)
    await old.until(lambda: bool(old.submits))

    old.drain(60.0)
    await edge.until(lambda: len(edge.replica_set.open_views) == 1)
    other = journal("b")
    edge.replica_set.place(other, Recorder(), 0.0)
    old.step()
    old.step()
    await edge.until(lambda: sink.finish_reason == "length")

    assert other.replica_id != one.replica_id
    for journal_ in (one, other):
        edge.replica_set.withdraw(journal_)


async def test_a_replica_that_leaves_the_membership_may_end_its_requests(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(step_s=None))
    one, sink = journal(max_tokens=1), Recorder()
    edge.replica_set.place(one, sink, 0.0)
    await edge.replica.until(lambda: bool(edge.replica.submits))

    edge.membership.publish("", {})
    await edge.until(lambda: not edge.replica_set.open_views)
    edge.replica.step()
    await edge.until(lambda: sink.finish_reason == "length")

    edge.replica_set.withdraw(one)
    await edge.replica.until(lambda: not edge.replica.num_attached)


async def test_a_replica_back_at_another_address_is_a_new_one(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(), ScriptedReplica(held_hashes=[b"h" * 16]))
    first, second = edge.replicas

    edge.membership.publish("", {"replica-0": second.address})

    await first.until(lambda: not first.num_attached)
    await edge.until(lambda: [s.address for s in edge.replica_set.streams if s.is_open] == [second.address])
    await edge.until(lambda: edge.replica_set.index.num_hashes == 1)


async def test_full_queues_refuse_new_requests_but_not_resumed_ones(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(step_s=None), limits=Limits(max_waiting_per_replica=1))
    first, second = journal("a"), journal("b")
    edge.replica_set.place(first, Recorder(), 0.0)

    with pytest.raises(Overloaded):
        edge.replica_set.place(second, Recorder(), 0.0)

    second.note_loss(Loss.BROKEN)
    edge.replica_set.place(second, Recorder(), 0.0)
    for one in (first, second):
        edge.replica_set.withdraw(one)


async def test_a_request_that_has_killed_replicas_is_given_up(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(step_s=None), limits=Limits(max_lost_replicas=2))
    one = journal()
    one.note_loss(Loss.BROKEN)
    one.note_loss(Loss.BROKEN)

    with pytest.raises(ReplicaLost, match="given up"):
        await edge.replica_set.place_or_wait(one, Recorder(), 0.0)


async def test_a_request_that_finds_no_replica_asks_for_one_to_be_started(make_edge) -> None:
    woken: list[str] = []
    edge = await make_edge(
        ScriptedReplica(step_s=None), timeouts=Timeouts(replica_wait_s=0.01), wake=woken.append
    )
    (replica,) = edge.replicas
    await replica.kill()
    await edge.until(lambda: not edge.replica_set.open_views)

    with pytest.raises(ReplicaLost):
        await edge.replica_set.place_or_wait(journal(), Recorder(), 0.0)

    assert woken == [""]  # the nameless group


async def test_a_bystander_that_gets_ahead_outlives_many_replicas_and_not_all(make_edge) -> None:
    edge = await make_edge(
        ScriptedReplica(step_s=None), limits=Limits(max_lost_replicas=2, max_lost_in_all=6)
    )
    one = journal()

    for _ in range(5):
        one.output_token_ids.append(7)
        one.note_loss(Loss.BROKEN)
        await edge.replica_set.place_or_wait(one, Recorder(), 0.0)
        edge.replica_set.withdraw(one)

    assert one.num_suspect_losses == 1
    one.output_token_ids.append(7)
    one.note_loss(Loss.BROKEN)
    with pytest.raises(ReplicaLost, match="6 replicas broke"):
        await edge.replica_set.place_or_wait(one, Recorder(), 0.0)


async def test_membership_is_handed_over_between_threads() -> None:
    membership = Membership()
    seen: list[dict[str, str]] = []
    complete = asyncio.Event()

    versions: list[int] = []

    def listener(members: dict[str, str], version: int) -> None:
        seen.append(members)
        versions.append(version)
        if len(members) == 20:
            complete.set()

    stop = membership.listen("m", listener)
    names = [f"r{i}" for i in range(20)]

    def publish() -> None:
        for i in range(20):
            membership.publish("m", dict.fromkeys(names[: i + 1], "host:1"))
            membership.publish("m", dict.fromkeys(names[: i + 1], "host:1"))

    thread = threading.Thread(target=publish)
    thread.start()
    await complete.wait()
    thread.join()

    assert [len(members) for members in seen] == versions == list(range(21))
    assert membership.version("m") == 20
    stop()
    membership.publish("m", {})
    await asyncio.sleep(0)
    assert len(seen) == 21


async def test_a_placement_tells_of_which_membership_it_was(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(step_s=None))
    (address,) = edge.membership.members("").values()
    before = edge.replica_set.membership_version
    edge.membership.publish("", {"replica-0": address, "replica-1": "127.0.0.1:1"})
    await edge.until(lambda: edge.replica_set.membership_version == before + 1)

    one = journal()
    edge.replica_set.place(one, Recorder(), 0.0)

    assert one.placements[0].membership_version == before + 1
    edge.replica_set.withdraw(one)


# Requests that may be what breaks replicas


def suspect(request_id: str) -> Journal:
    """One that has lost two replicas in a row without a token."""
    one = journal(request_id)
    one.note_loss(Loss.BROKEN)
    one.note_loss(Loss.BROKEN)
    return one


async def test_suspects_go_one_at_a_time_until_each_has_a_token(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(step_s=None))
    first, second, bystander = suspect("a"), suspect("b"), journal("c")
    await edge.replica_set.place_or_wait(first, Recorder(), 0.0)
    waiting = asyncio.create_task(edge.replica_set.place_or_wait(second, Recorder(), 0.0))
    await edge.replica_set.place_or_wait(bystander, Recorder(), 0.0)
    await edge.replica.until(lambda: edge.replica.num_running == 2)
    assert not waiting.done()

    edge.replica.step()
    await waiting

    await edge.replica.until(lambda: edge.replica.num_running == 3)
    for one in (first, second, bystander):
        edge.replica_set.withdraw(one)


@pytest.mark.parametrize("end", ["withdrawn", "lost", "cancelled in line"])
async def test_a_suspect_that_goes_makes_way_for_the_next(make_edge, end: str) -> None:
    edge = await make_edge(ScriptedReplica(step_s=None), ScriptedReplica(step_s=None))
    first, second, third = suspect("a"), suspect("b"), suspect("c")
    await edge.replica_set.place_or_wait(first, Recorder(), 0.0)
    others = [
        asyncio.create_task(edge.replica_set.place_or_wait(one, Recorder(), 0.0)) for one in (second, third)
    ]
    await asyncio.sleep(0)
    place = next(one for one in edge.replicas if one.replica_id == first.replica_id)

    if end == "cancelled in line":
        others[0].cancel()
        edge.replica_set.withdraw(first)
        await others[1]
    elif end == "lost":
        await place.kill()
        await others[0]
        edge.replica_set.withdraw(second)
        await others[1]
    else:
        edge.replica_set.withdraw(first)
        await others[0]
        edge.replica_set.withdraw(second)
        await others[1]

    for one in (first, second, third):
        edge.replica_set.withdraw(one)
    assert edge.replica_set.num_held == 0


async def test_what_breaks_replicas_takes_no_bystander_along(make_edge) -> None:
    replicas = [ScriptedReplica(step_s=None) for _ in range(2)]
    deaths: list[str] = []
    edge = await make_edge(*replicas)

    async def fail() -> None:
        """Replicas that a step with the poison ends, and that come back."""
        while len(deaths) < 3:
            for replica in replicas:
                if any(bytes(s.prompt_token_ids) == b"poison" * 8 for s in replica.submits):
                    deaths.append(replica.replica_id)
                    await replica.kill()
                    replica.submits.clear()
                    await replica.start()
                elif deaths:
                    replica.step()
            await asyncio.sleep(0.01)
        while True:
            for replica in replicas:
                replica.step()
            await asyncio.sleep(0.001)

    failing = asyncio.create_task(fail())
    prompts = ["poison" * 8, *(f"good {number}" * 8 for number in range(4))]
    answers = await asyncio.gather(*(edge.complete(prompt=one, max_tokens=4) for one in prompts))
    failing.cancel()

    assert [answer.status_code for answer in answers] == [503, 200, 200, 200, 200]
    assert len(deaths) == 3
