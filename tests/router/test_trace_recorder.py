"""Recording at an ingress: what ``shoal simulate`` reads back is what clients sent."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from router.journal import Journal, Prompt
from router.placement.replica_view import ReplicaShape
from router.scripted_replica import ScriptedReplica
from router.trace import Trace, merge_traces, read_trace
from router.trace_lines import TraceRequest
from router.trace_recorder import TraceRecorder
from workers.engine.errors import InvalidRequest
from workers.engine.request import ChoiceParams

SHAPE = ReplicaShape(block_size=16, hash_root=b"root")


def ended(num_prompt_tokens: int = 40, num_output_tokens: int = 3) -> Journal:
    journal = Journal("r", Prompt(list(range(num_prompt_tokens))), ChoiceParams(max_tokens=8))
    journal.prompt.hashes(SHAPE)
    journal.output_token_ids.extend([1] * num_output_tokens)
    return journal


def test_a_recorded_request_is_read_back_with_its_arrival_lengths_and_blocks(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "new", "org/model", lambda: 1000.0)
    journal = ended()

    recorder.note(journal, age_s=2.5)
    recorder.close()

    assert recorder.path.name.startswith("org_model-")
    expected = TraceRequest(997.5, 40, 3, journal.prompt.hashes(SHAPE))
    assert read_trace(recorder.path) == Trace(16, [expected])


def test_a_request_that_no_replica_had_is_left_out(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path, "m", lambda: 0.0)

    recorder.note(Journal("r", Prompt([1, 2]), ChoiceParams(max_tokens=1)), age_s=0.0)
    recorder.close()
    recorder.close()

    assert list(tmp_path.iterdir()) == []


def test_recording_ends_at_its_limit_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = TraceRecorder(tmp_path, "m", lambda: 0.0, max_bytes=400)

    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            recorder.note(ended(), age_s=0.0)
        recorder.close()

    assert 400 < recorder.path.stat().st_size < 800
    assert "recording ends" in caplog.text
    read_trace(recorder.path)  # what is there is whole


def test_a_folder_that_cannot_be_written_costs_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    recorder = TraceRecorder(tmp_path / "file" / "below", "m", lambda: 0.0)

    recorder.note(ended(), age_s=0.0)
    recorder.close()

    assert "no longer recorded" in caplog.text


async def test_an_ingress_records_each_choice_and_no_text(make_edge, tmp_path: Path) -> None:
    edge = await make_edge(ScriptedReplica(), trace_folder=tmp_path)

    await edge.complete(prompt="a secret of forty-eight letters, three full blocks", max_tokens=5, n=2)
    await edge.complete(prompt="short", max_tokens=1, stream=True)
    await edge.ingress.stop()

    path = edge.ingress.models[0].recorder.path
    requests = read_trace(path).requests
    assert b"secret" not in path.read_bytes()
    assert sorted((one.num_prompt_tokens, one.num_output_tokens, len(one.hashes)) for one in requests) == [
        (5, 1, 0),
        (50, 5, 3),
        (50, 5, 3),
    ]


def test_merged_traces_are_in_order_and_begin_at_zero() -> None:
    first = Trace(16, [TraceRequest(100.0, 1, 1, []), TraceRequest(103.0, 2, 1, [])])
    second = Trace(16, [TraceRequest(101.5, 3, 1, [])])

    merged = merge_traces([first, second])

    assert [(one.arrival_s, one.num_prompt_tokens) for one in merged.requests] == [
        (0.0, 1),
        (1.5, 3),
        (3.0, 2),
    ]


def test_traces_of_different_block_sizes_cannot_be_merged() -> None:
    with pytest.raises(InvalidRequest, match=r"\[16, 32\]"):
        merge_traces([Trace(16, []), Trace(32, [])])
