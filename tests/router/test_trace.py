"""Traces: two formats, ticks, and errors that say where."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from router.trace import Trace, read_trace, write_trace
from router.trace_lines import TraceRequest
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


def mooncake_line(**given: str) -> str:
    """One whose fields are JSON."""
    fields = {"timestamp": "0", "input_length": "40", "output_length": "7", "hash_ids": "[3]"} | given
    return "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}"


def test_hashes_may_be_unknown_and_those_of_a_partial_block_left_out(tmp_path) -> None:
    for content in (
        mooncake_line(),
        mooncake_line(hash_ids="[]"),
        shoal_lines(),
        shoal_lines(block_hashes="[]"),
    ):
        (tmp_path / "t.jsonl").write_text(content)

        assert [one.num_prompt_tokens for one in read_trace(tmp_path / "t.jsonl").requests] == [40]


def shoal_lines(**given: str) -> str:
    """A header and a line whose fields are JSON."""
    fields = {"arrival_s": "0", "num_prompt_tokens": "40", "num_output_tokens": "7"}
    fields |= {"block_hashes": json.dumps(["00" * 16] * 2)} | given
    line = "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}"
    return f'{{"format": "shoal-trace", "version": 1, "block_size": 16}}\n{line}'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "line 1: invalid JSON"),
        ("[]", r"line 1: it is \[\], a request is an object"),
        ("{}", "line 1: timestamp is missing"),
        ('{"timestamp": 0}', "line 1: input_length is missing"),
        (mooncake_line(timestamp="NaN"), "line 1: timestamp is NaN: .*finite"),
        (mooncake_line(timestamp="1e400"), "line 1: timestamp is Infinity: .*finite"),
        (mooncake_line(timestamp="-1"), "line 1: timestamp is -1.*: .*greater than or equal to 0"),
        (mooncake_line(timestamp="true"), "line 1: timestamp is true: .*valid number"),
        (mooncake_line(input_length="0"), "line 1: input_length is 0: .*greater than or equal to 1"),
        (mooncake_line(input_length='"5"'), 'line 1: input_length is "5": .*valid integer'),
        (mooncake_line(input_length="10000000000"), "line 1: input_length is 10000000000: .* 10000000"),
        (mooncake_line(output_length="10000001"), "line 1: output_length is 10000001: .* 10000000"),
        (
            mooncake_line(input_length="5000"),
            "line 1: lengths and blocks .* 5000 has 10 blocks .* hash_ids has 1",
        ),
        (mooncake_line(hash_ids="[1, 2]"), "line 1: lengths and blocks do not agree"),
        (mooncake_line(hash_ids='["a"]'), 'line 1: hash_ids.0 is "a": .*valid integer'),
        (mooncake_line(hash_ids=str([1 << 128])), r"line 1: hash_ids.0 is \d+: .*less than"),
        (mooncake_line() + "\n\n" + mooncake_line(timestamp="null"), "line 3: timestamp is null"),
        ('{"format": "shoal-trace", "version": 2, "block_size": 16}', "line 1: version is 2: .*1"),
        ('{"format": "shoal-trace", "version": 1}', "line 1: block_size is missing"),
        ('{"format": "shoal-trace", "version": 1, "block_size": 0}', "line 1: block_size is 0: "),
        (shoal_lines(num_prompt_tokens="Infinity"), "line 2: num_prompt_tokens is Infinity: "),
        (
            shoal_lines(num_prompt_tokens="48"),
            "line 2: lengths and blocks .* 48 has 3 full .* block_hashes has 2",
        ),
        (shoal_lines(block_hashes='["00"]'), 'line 2: block_hashes.0 is "00": '),
        (shoal_lines(arrival_s="1e300"), "line 2: arrival_s is 1e\\+300: "),
    ],
)
def test_a_bad_line_is_named_with_its_field_and_value(tmp_path, content: str, said: str) -> None:
    (tmp_path / "t.jsonl").write_text(content)

    with pytest.raises(InvalidRequest, match=said):
        read_trace(tmp_path / "t.jsonl")


def test_what_is_no_file_and_no_archive_is_said(tmp_path) -> None:
    (tmp_path / "t.gz").write_text("plain")
    whole = gzip.compress(b'{"timestamp": 0}' * 99)
    (tmp_path / "cut.gz").write_bytes(whole[:-20])
    (tmp_path / "spoilt.gz").write_bytes(whole[:12] + b"\xff" * 9 + whole[21:])

    for name in ("none.jsonl", "t.gz", "cut.gz", "spoilt.gz"):
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

    with pytest.raises(
        InvalidRequest, match='line 2: ContextTokens is "0": it must be a whole number from 1'
    ):
        read_trace(path)


def test_a_trace_can_be_repeated_at_a_rate_that_changes() -> None:
    trace = Trace(16, [TraceRequest(float(second), 1, 1, []) for second in range(10)])

    day = trace.repeated(100.0, lambda time_s: 2.0 if time_s < 50 else 1.0)

    arrivals = [one.arrival_s for one in day.requests]
    assert arrivals == sorted(arrivals)
    assert sum(time_s < 50 for time_s in arrivals) == pytest.approx(100, abs=6)
    assert sum(time_s >= 50 for time_s in arrivals) == pytest.approx(50, abs=6)
