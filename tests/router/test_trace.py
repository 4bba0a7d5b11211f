"""Traces: two formats, ticks, and errors that say where."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from router.trace import Trace, TraceRequest, read_trace, write_trace
from workers.engine.errors import InvalidRequest


def mooncake(path: Path, *rows: tuple[int, int, list[int]]) -> Path:
    lines = [
        json.dumps({"timestamp": at_ms, "input_length": length, "output_length": 7, "hash_ids": ids})
        for at_ms, length, ids in rows
    ]
    path.write_text("\n".join(lines))
    return path


def test_a_mooncake_id_names_a_full_block_and_a_partial_tail_has_no_hash(tmp_path) -> None:
    trace = read_trace(mooncake(tmp_path / "t.jsonl", (0, 1100, [0, 5, 9]), (1500, 1024, [0, 5])))

    first, second = trace.requests
    assert (trace.block_size, first.num_prompt_tokens, first.num_output_tokens) == (512, 1100, 7)
    assert len(first.hashes) == 2
    assert first.hashes == second.hashes
    assert second.arrival_s == 1.5


def test_requests_stamped_in_ticks_are_spread_over_them(tmp_path) -> None:
    rows = [(at_ms, 10, [at_ms]) for at_ms in (0, 0, 0, 3000, 3000, 3000)]

    trace = read_trace(mooncake(tmp_path / "t.jsonl", *rows))

    assert [one.arrival_s for one in trace.requests] == pytest.approx([0, 1, 2, 3, 4, 5])


def test_a_few_equal_arrival_times_are_left_alone(tmp_path) -> None:
    rows = [(at_ms, 10, [at_ms]) for at_ms in (0, 0, 300, 450, 900)]

    trace = read_trace(mooncake(tmp_path / "t.jsonl", *rows))

    assert [one.arrival_s for one in trace.requests] == [0, 0, 0.3, 0.45, 0.9]


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_our_own_format_comes_back_as_it_was_written(tmp_path, name: str) -> None:
    hashes = [bytes([i]) * 16 for i in range(2)]
    trace = Trace(16, [TraceRequest(0.25, 40, 12, hashes), TraceRequest(0.5, 3, 1, [])])

    write_trace(tmp_path / name, trace)

    assert read_trace(tmp_path / name) == trace


def test_a_trace_can_be_cut_and_played_faster() -> None:
    trace = Trace(16, [TraceRequest(float(i), 3, 1, []) for i in range(4)])

    assert [one.arrival_s for one in trace.first(3).at_rate(2.0).requests] == [0, 0.5, 1]
    assert [one.arrival_s for one in trace.after(2).first(2).requests] == [0, 1]
    assert not trace.after(len(trace.requests)).requests
    assert trace.span_s == 3


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "line 1: JSONDecodeError"),
        ('{"timestamp": 0}', "line 1: KeyError: 'input_length'"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}', "lengths and blocks"),
        ('{"format": "shoal-trace", "version": 2, "block_size": 16}', "version 2 is not 1"),
        ("[]", "line 1: AttributeError"),
    ],
)
def test_a_bad_line_is_named(tmp_path, content: str, said: str) -> None:
    (tmp_path / "t.jsonl").write_text(content)

    with pytest.raises(InvalidRequest, match=said):
        read_trace(tmp_path / "t.jsonl")


def test_what_is_no_file_and_no_archive_is_said(tmp_path) -> None:
    (tmp_path / "t.gz").write_text("plain")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b'{"timestamp": 0}' * 99)[:-20])

    for name in ("none.jsonl", "t.gz", "cut.gz"):
        with pytest.raises(InvalidRequest, match="cannot be read"):
            read_trace(tmp_path / name)


def test_azures_tables_are_read_with_times_from_zero(tmp_path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9305900,396,109\n"
    )

    first, second = read_trace(path).requests

    assert (first.arrival_s, first.num_prompt_tokens, first.num_output_tokens) == (0.0, 374, 44)
    assert second.arrival_s == pytest.approx(4.25)


def test_a_bad_line_of_azures_is_named(tmp_path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,0,44\n")

    with pytest.raises(InvalidRequest, match="line 2: a length is out of range"):
        read_trace(path)


def test_a_trace_can_be_repeated_at_a_rate_that_changes() -> None:
    trace = Trace(16, [TraceRequest(float(second), 1, 1, []) for second in range(10)])

    day = trace.repeated(100.0, lambda time_s: 2.0 if time_s < 50 else 1.0)

    arrivals = [one.arrival_s for one in day.requests]
    assert arrivals == sorted(arrivals)
    assert sum(time_s < 50 for time_s in arrivals) == pytest.approx(100, abs=6)
    assert sum(time_s >= 50 for time_s in arrivals) == pytest.approx(50, abs=6)
