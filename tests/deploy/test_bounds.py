"""What grows with traffic stays within its bound when ten times as much comes: the table of deploy/docs/memory.md."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.outbox import MAX_WAITING_MESSAGES, Outbox, OutboxFull
from cluster.proto import shoal_pb2 as pb
from router import ledger as ledgers
from router.generation import Generation, _Mailbox
from router.journal import Journal, Prompt
from router.placement.prefix_index import PrefixIndex
from router.placement.replica_view import MAX_COMING_HASHES, ReplicaShape, ReplicaView
from router.telemetry.step_log import NUM_FIRST, NUM_LONGEST, StepLog
from router.tenancy.fair_line import MEMORY_S, FairLine
from router.trace_recorder import TraceRecorder
from workers.engine.policy import _MOST_TENANTS, FairShare
from workers.engine.request import ChoiceParams, EngineRequest
from workers.model import row_sampler

SHAPE = ReplicaShape(block_size=16, hash_root=b"root")


def hashes(first: int, count: int) -> bytes:
    return b"".join(struct.pack("<QQ", number, 0) for number in range(first, first + count))


def fill_prefix_index() -> tuple[int, int]:
    index = PrefixIndex(max_hashes=1000)
    list(index.load_snapshot("r", 0, b""))
    for part in range(10):
        index.apply("r", 1000 * part, hashes(1000 * part, 1000), b"")
    index.check()
    assert index.num_dropped == 9000
    return index.num_hashes, 1000


def fill_coming_blocks() -> tuple[int, int]:
    view = ReplicaView("r", SHAPE)
    for number in range(10 * MAX_COMING_HASHES // 512):
        view.note_coming(
            number, [bytes((number & 255, number >> 8, i & 255, i >> 8)) * 4 for i in range(512)]
        )
    view.check()
    return view.num_coming_hashes, MAX_COMING_HASHES


def fill_outbox() -> tuple[int, int]:
    outbox, num_refused = Outbox(), 0
    for _ in range(10 * MAX_WAITING_MESSAGES):
        try:
            outbox.put(pb.ReplicaMessage())
        except OutboxFull:
            num_refused += 1
    assert num_refused == 9 * MAX_WAITING_MESSAGES
    return len(outbox), MAX_WAITING_MESSAGES


def fill_outbox_with_steps() -> tuple[int, int]:
    outbox = Outbox()
    for _ in range(10 * MAX_WAITING_MESSAGES):
        outbox.put_step([], None, pb.Load(num_steps=1))
    return len(outbox), 1


def fill_mailbox() -> tuple[int, int]:
    closed: list[bool] = []
    mailbox = _Mailbox(100, lambda: closed.append(True))
    most = 0
    for _ in range(1000):
        mailbox.put((0, None))  # type: ignore[arg-type]
        most = max(most, len(mailbox._items))
    assert closed
    assert mailbox.has_overflowed
    return most, 100


def fill_step_log() -> tuple[int, int]:
    log = StepLog(0.0)
    for number in range(10 * (NUM_FIRST + NUM_LONGEST)):
        log.note(float(number), 1, 1, 0)
    return len(log.steps), NUM_FIRST + NUM_LONGEST


def fill_callers() -> tuple[int, int]:
    """A new caller every second for ten times as long as callers are remembered."""
    line: FairLine[int] = FairLine()
    for second in range(int(10 * MEMORY_S)):
        line.see(f"caller {second}", float(second))
        line.charge(f"caller {second}", 10, 10)
    line.check()
    return line.num_known, int(1.1 * MEMORY_S) + 1  # it looks every tenth of that time


def fill_tenants() -> tuple[int, int]:
    policy = FairShare()
    for number in range(20 * _MOST_TENANTS):
        request = EngineRequest(str(number), [1], ChoiceParams(max_tokens=1), tenant=f"tenant {number}")
        policy.turn(request, number)
        policy.ended(request, 1)
    return policy.num_tenants, 2 * _MOST_TENANTS


def fill_masks() -> tuple[int, int]:
    for number in range(10 * row_sampler._MASKS_KEPT):
        row_sampler._packed((number,))
    return row_sampler._packed.cache_info().currsize, row_sampler._MASKS_KEPT


CACHES: dict[str, Callable[[], tuple[int, int]]] = {
    "prefix index over all replicas": fill_prefix_index,
    "blocks announced by other ingresses": fill_coming_blocks,
    "messages that a slow ingress has not read": fill_outbox,
    "steps that a slow ingress has not read": fill_outbox_with_steps,
    "outputs that a slow client has not read": fill_mailbox,
    "steps of a traced request": fill_step_log,
    "callers in contention": fill_callers,
    "tenants in the brain": fill_tenants,
    "masks of allowed_token_ids": fill_masks,
}


@pytest.mark.parametrize("cache", CACHES)
def test_ten_times_its_bound_leaves_a_cache_within_it(cache: str) -> None:
    num_entries, bound = CACHES[cache]()

    assert 0 < num_entries <= bound


def test_a_trace_ends_at_its_size_and_keeps_nothing_for_later(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path, "model", lambda: 0.0, max_bytes=10_000)
    journal = Journal("r", Prompt(list(range(40))), ChoiceParams(max_tokens=8))
    journal.prompt.hashes(SHAPE)

    for _ in range(2000):
        recorder.note(journal, 0.0)
    recorder._thread.join(30)
    for _ in range(2000):
        recorder.note(journal, 0.0)

    assert recorder.num_queued == 0
    assert 10_000 < recorder.path.stat().st_size < 11_000
    recorder.close()


def test_a_slow_disk_costs_a_trace_its_requests_and_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("router.trace_recorder.MAX_QUEUED", 50)
    monkeypatch.setattr(TraceRecorder, "_write_all", lambda recorder: None)
    recorder = TraceRecorder(tmp_path, "model", lambda: 0.0)
    journal = Journal("r", Prompt(list(range(40))), ChoiceParams(max_tokens=8))
    journal.prompt.hashes(SHAPE)

    for _ in range(500):
        recorder.note(journal, 0.0)

    assert recorder.num_queued == 50
    recorder.close()
    assert "lacks 450 requests" in caplog.text


def test_ended_requests_are_forgotten_by_number_and_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "_tell", lambda running, state: b"x" * 100)

    def fill(num_requests: int) -> ledgers.Ledger:
        ledger = ledgers.Ledger(lambda: 0.0)
        for number in range(num_requests):
            generation = object.__new__(Generation)
            generation.request_id = str(number)
            ledger.begin(generation, f"http {number}", "")
            ledger.end(generation)
        ledger.check()
        return ledger

    assert fill(10 * ledgers.MAX_ENDED).num_ended == ledgers.MAX_ENDED
    monkeypatch.setattr(ledgers, "MAX_BYTES", 1000)
    assert fill(100).num_bytes <= 1000
