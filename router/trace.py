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
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, cycle, groupby
from pathlib import Path

from router.trace_lines import (
    AZURE_HEADER,
    MOONCAKE_BLOCK_SIZE,
    LineReader,
    TraceRequest,
    header_line,
    is_header,
    read_azure,
    read_header,
    read_mooncake,
    refusal,
    request_line,
    shoal_reader,
)
from workers.engine.errors import InvalidRequest

TICK_SHARE = 0.5
"""Fewer distinct arrival times than this share of the requests: stamped in ticks, not when they came."""


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
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise InvalidRequest(f"trace {path} cannot be read: {error}", "trace") from error
    except ValueError as error:
        raise InvalidRequest(f"trace {path}, {error}", "trace") from error


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace in Shoal's own format."""
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        file.write(header_line(trace.block_size))
        file.writelines(map(request_line, trace.requests))


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
    first = next(lines, None)
    if first is None:
        return Trace(MOONCAKE_BLOCK_SIZE, [])
    number, line = first
    if line.strip() == AZURE_HEADER:
        return merge_traces([Trace(MOONCAKE_BLOCK_SIZE, list(_requests(lines, read_azure)))])
    if is_header(line):
        with _named(number):
            block_size = read_header(line)
        return Trace(block_size, sorted(_requests(lines, shoal_reader(block_size)), key=_arrival))
    requests = sorted(_requests(chain([first], lines), read_mooncake), key=_arrival)
    return Trace(MOONCAKE_BLOCK_SIZE, _spread(requests))


def _requests(lines: Iterable[tuple[int, str]], read: LineReader) -> Iterator[TraceRequest]:
    for number, line in lines:
        with _named(number):
            yield read(line)


@contextmanager
def _named(number: int) -> Iterator[None]:
    """Have a line that is refused named."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"line {number}: {refusal(error)}") from None


def _arrival(one: TraceRequest) -> float:
    return one.arrival_s


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
