"""``shoal trace ...``: what ``shoal serve --record-trace`` wrote, made ready for ``shoal simulate``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from deploy.bench.options import MOST_TIMES, check_order, finite
from deploy.console import console, counted
from deploy.durations import MOST_S
from deploy.output_file import check_output, is_same_file
from router.trace import Trace, merge_traces, read_trace, write_trace
from workers.engine.errors import InvalidRequest

app = typer.Typer(
    help="Recorded requests: arrivals, lengths and block hashes, no text (`shoal serve --record-trace`).",
    no_args_is_help=True,
)


@app.command()
def merge(
    folder: Annotated[Path, typer.Argument(help="What --record-trace was given, or one of its files.")],
    output: Annotated[Path, typer.Argument(help="The trace to write; compressed if it ends in .gz.")],
    model: Annotated[str, typer.Option(help="Only files whose names begin so.")] = "",
) -> None:
    """Put the files of all ingresses in order, beginning at time zero."""
    paths = sorted(folder.glob(f"{model}*.jsonl")) if folder.is_dir() else [folder]
    if not paths:
        raise InvalidRequest(f"{folder} has no file {model}*.jsonl: nothing was recorded there", "folder")
    _check_output(output, paths)
    trace = merge_traces([read_trace(path) for path in paths])
    _write(output, trace)
    console.print(f"{counted(len(paths), 'file')} → {output}")
    _show(trace)


@app.command()
def day(
    trace: Annotated[Path, typer.Argument(help="A trace of any format, played over and over.")],
    output: Annotated[Path, typer.Argument(help="The trace to write; compressed if it ends in .gz.")],
    hours: Annotated[
        float, typer.Option(min=0.01, max=MOST_S / 3600, callback=finite, help="Length of the day.")
    ] = 24.0,
    low: Annotated[
        float,
        typer.Option(
            min=0.001,
            max=MOST_TIMES,
            callback=finite,
            help="Rate at its beginning and end, times the trace's own.",
        ),
    ] = 0.2,
    high: Annotated[
        float, typer.Option(min=0.001, max=MOST_TIMES, callback=finite, help="Rate at its middle.")
    ] = 2.0,
) -> None:
    """Compose a day of traffic: rate low + (high - low) (1 - cos(2 pi t / day)) / 2 at time t."""
    check_order("--low", low, "--high", high, is_equal_fine=True)
    _check_output(output, [trace])
    span_s = hours * 3600

    def rate_at(time_s: float) -> float:
        return low + (high - low) * (1 - math.cos(2 * math.pi * time_s / span_s)) / 2

    played = read_trace(trace)
    if played.span_s <= 0:
        raise InvalidRequest(f"trace {trace} lasts no time: it cannot be repeated", "trace")
    composed = played.repeated(span_s, rate_at)
    _write(output, composed)
    _show(composed)


@app.command()
def show(trace: Annotated[Path, typer.Argument(help="JSON lines, Mooncake's or Shoal's own.")]) -> None:
    """Say how many requests a trace has, how long they are and how much of them repeats."""
    _show(read_trace(trace))


def _check_output(output: Path, inputs: Sequence[Path]) -> None:
    check_output(output, "OUTPUT")
    if any(path.exists() and is_same_file(output, path) for path in inputs):
        raise InvalidRequest(f"OUTPUT {output} would overwrite what was recorded: name another", "output")


def _write(output: Path, trace: Trace) -> None:
    try:
        write_trace(output, trace)
    except OSError as error:
        raise InvalidRequest(f"OUTPUT {output} cannot be written: {error.strerror}", "output") from None


def _show(trace: Trace) -> None:
    requests = trace.requests
    num_prompt_tokens = sum(one.num_prompt_tokens for one in requests)
    num_output_tokens = sum(one.num_output_tokens for one in requests)
    seen: set[bytes] = set()
    num_hit_blocks = 0
    for one in requests:
        num_hit_blocks += next((i for i, h in enumerate(one.hashes) if h not in seen), len(one.hashes))
        seen.update(one.hashes)
    count = max(1, len(requests))
    table = Table("", "", show_header=False)
    table.add_row("requests", f"{len(requests)}")
    table.add_row("span", f"{trace.span_s:.1f} s")
    table.add_row("mean prompt tokens", f"{num_prompt_tokens / count:.0f}")
    table.add_row("mean output tokens", f"{num_output_tokens / count:.0f}")
    table.add_row("tokens a block", f"{trace.block_size}")
    share = num_hit_blocks * trace.block_size / max(1, num_prompt_tokens)
    table.add_row("prompt tokens seen before", f"{share:.1%}")
    console.print(table)
