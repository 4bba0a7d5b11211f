"""Recorded requests: when each came, how long it was, which blocks of its prompt it shares. No text.

Three formats, told apart by their first line, gzip-compressed if the name ends in ``.gz``. JSON lines:

*Shoal's own*: a header ``{"format": "shoal-trace", "version": 1, "block_size": 16}``, then for each request
``{"arrival_s": 0.5, "num_prompt_tokens": 40, "num_output_tokens": 12, "block_hashes": ["<32 hex digits>", ...]}``
with one chained hash for each full block of the prompt.

*Mooncake's* (https://github.com/kvcache-ai/Mooncake, FAST25-release/traces): ``{"timestamp": <ms>,
"input_length": ..., "output_length": ..., "hash_ids": [...]}``, one id for each 512-token block, the last
one possibly partial. An id stands for its block and all before it, as a chained hash does.

*Azure's* (https://github.com/Azure/AzurePublicDataset, 2023) are tables with commas, ``TIMESTAMP,ContextTokens,
GeneratedTokens``, and know nothing of common prefixes.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain, cycle, groupby
from pathlib import Path
from typing import Any

from workers.engine.block_hash import HASH_BYTES
from workers.engine.errors import InvalidRequest

FORMAT, VERSION = "shoal-trace", 1
MOONCAKE_BLOCK_SIZE = 512
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
TICK_SHARE = 0.5
"""Fewer distinct arrival times than this share of the requests: stamped in ticks, not when they came."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hashes: list[bytes]
    """Chained hashes of the prompt's full blocks."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival."""

    block_size: int
    requests: Sequence[TraceRequest]

    @property
    def span_s(self) -> float:
        """From time zero to the last arrival."""
        return self.requests[-1].arrival_s if self.requests else 0.0

    def first(self, num_requests: int | None) -> Trace:
        """Its first requests; None: all."""
        return self if num_requests is None else replace(self, requests=self.requests[:num_requests])

    def after(self, num_requests: int) -> Trace:
        """What follows its first requests, as if it began there."""
        rest = self.requests[num_requests:]
        start_s = rest[0].arrival_s if rest else 0.0
        return replace(self, requests=[replace(one, arrival_s=one.arrival_s - start_s) for one in rest])

    def at_rate(self, rate: float) -> Trace:
        """The same requests, ``rate`` times as fast."""
        return replace(self, requests=[replace(one, arrival_s=one.arrival_s / rate) for one in self.requests])

    def repeated(self, span_s: float, rate_at: Callable[[float], float]) -> Trace:
        """The requests over and over for ``span_s``, at time t ``rate_at(t)`` times as fast as they were recorded."""
        if not self.requests or self.span_s <= 0:
            raise ValueError("a trace to repeat must last a while")
        requests: list[TraceRequest] = []
        now_s, before_s = 0.0, 0.0
        # The gap between the last request and the next round's first one: as long as a mean gap.
        mean_gap_s = self.span_s / len(self.requests)
        for one in cycle(self.requests):
            gap_s = one.arrival_s - before_s if one.arrival_s >= before_s else mean_gap_s
            before_s = one.arrival_s
            now_s += gap_s / rate_at(now_s)
            if now_s > span_s:
                break
            requests.append(replace(one, arrival_s=now_s))
        return replace(self, requests=requests)


def read_trace(path: Path) -> Trace:
    """Read a trace of either format.

    Requests that were stamped in ticks are spread evenly from their tick to the next.

    Raises:
        InvalidRequest: the file cannot be read, or a line is not what its format says; the message has its number.
    """
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
            return _parse(numbered)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"trace {path} cannot be read: {error}", "trace") from error
    except ValueError as error:
        raise InvalidRequest(f"trace {path}, {error}", "trace") from error


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace in Shoal's own format."""
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        file.write(header_line(trace.block_size))
        file.writelines(map(request_line, trace.requests))


def header_line(block_size: int) -> str:
    """The first line of a file in Shoal's own format."""
    return json.dumps({"format": FORMAT, "version": VERSION, "block_size": block_size}) + "\n"


def request_line(one: TraceRequest) -> str:
    """One request in Shoal's own format."""
    line = {
        "arrival_s": round(one.arrival_s, 6),
        "num_prompt_tokens": one.num_prompt_tokens,
        "num_output_tokens": one.num_output_tokens,
        "block_hashes": [block_hash.hex() for block_hash in one.hashes],
    }
    return json.dumps(line) + "\n"


def merge_traces(traces: Sequence[Trace]) -> Trace:
    """What several ingresses recorded, as one trace that begins at time zero.

    Raises:
        InvalidRequest: there is none, or they differ in block size.
    """
    sizes = sorted({trace.block_size for trace in traces})
    if len(sizes) != 1:
        raise InvalidRequest(f"traces to merge have block sizes {sizes}: give files of one size", "traces")
    requests = sorted((one for trace in traces for one in trace.requests), key=lambda one: one.arrival_s)
    first_s = requests[0].arrival_s if requests else 0.0
    return Trace(sizes[0], [replace(one, arrival_s=one.arrival_s - first_s) for one in requests])


def _parse(lines: Iterator[tuple[int, str]]) -> Trace:
    block_size, read, requests = MOONCAKE_BLOCK_SIZE, _mooncake_request, []
    first = next(lines, None)
    if first is not None and first[1].strip() == AZURE_HEADER:
        return _parse_azure(lines)
    for number, line in chain([first] if first is not None else [], lines):
        try:
            fields = json.loads(line)
            if number == 1 and fields.get("format") == FORMAT:
                if fields["version"] != VERSION:
                    raise ValueError(f"version {fields['version']} is not {VERSION}")
                block_size, read = int(fields["block_size"]), _shoal_request
                continue
            one = read(fields)
            if one.num_prompt_tokens < max(1, len(one.hashes) * block_size) or one.num_output_tokens < 0:
                raise ValueError("lengths and blocks do not agree")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"line {number}: {type(error).__name__}: {error}") from error
        requests.append(one)
    requests.sort(key=lambda one: one.arrival_s)
    return Trace(block_size, _spread(requests) if read is _mooncake_request else requests)


def _parse_azure(lines: Iterator[tuple[int, str]]) -> Trace:
    requests = []
    for number, line in lines:
        try:
            stamp, num_prompt_tokens, num_output_tokens = line.split(",")
            # Python reads microseconds; the tables have one digit more.
            arrival_s = datetime.fromisoformat(stamp[:26]).replace(tzinfo=UTC).timestamp()
            one = TraceRequest(arrival_s, int(num_prompt_tokens), int(num_output_tokens), [])
            if one.num_prompt_tokens < 1 or one.num_output_tokens < 0:
                raise ValueError("a length is out of range")
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
        requests.append(one)
    return merge_traces([Trace(MOONCAKE_BLOCK_SIZE, requests)])


def _mooncake_request(fields: dict[str, Any]) -> TraceRequest:
    num_tokens = int(fields["input_length"])
    num_full = num_tokens // MOONCAKE_BLOCK_SIZE
    return TraceRequest(
        fields["timestamp"] / 1000,
        num_tokens,
        int(fields["output_length"]),
        [block_id.to_bytes(HASH_BYTES, "big") for block_id in fields["hash_ids"][:num_full]],
    )


def _shoal_request(fields: dict[str, Any]) -> TraceRequest:
    hashes = [bytes.fromhex(block_hash) for block_hash in fields["block_hashes"]]
    if any(len(block_hash) != HASH_BYTES for block_hash in hashes):
        raise ValueError(f"a block hash has not {HASH_BYTES} bytes")
    return TraceRequest(
        float(fields["arrival_s"]), int(fields["num_prompt_tokens"]), int(fields["num_output_tokens"]), hashes
    )


def _spread(requests: list[TraceRequest]) -> list[TraceRequest]:
    """Give requests that were stamped in ticks the times between."""
    ticks = [list(group) for _, group in groupby(requests, key=lambda one: one.arrival_s)]
    if len(ticks) < 2 or len(ticks) > TICK_SHARE * len(requests):
        return requests
    starts = [tick[0].arrival_s for tick in ticks]
    starts.append(2 * starts[-1] - starts[-2])
    return [
        replace(one, arrival_s=start_s + (end_s - start_s) * position / len(tick))
        for tick, start_s, end_s in zip(ticks, starts, starts[1:], strict=False)
        for position, one in enumerate(tick)
    ]
