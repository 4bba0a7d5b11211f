"""Tables that stay whole on a narrow terminal: columns that do not fit beside each other come below, never cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

_FRAME = 3
"""Of a column: a line and a blank on both sides."""


def print_table(
    console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]], title: str = ""
) -> None:
    """Print ``rows`` under ``headings``; the first column, which names the rows, is repeated where the table is folded.

    Values never wrap; headings do, between words, where the table would be too wide otherwise.
    """
    values = [max((len(row[index]) for row in rows), default=0) for index in range(len(headings))]
    widths = [max(len(heading), value, 1) for heading, value in zip(headings, values, strict=True)]
    if sum(widths) + _FRAME * len(widths) >= console.width:
        widths = [
            max(_longest_word(heading), value, 1) for heading, value in zip(headings, values, strict=True)
        ]
    for columns in _folded(widths, console.width):
        shown = (Column(Text(headings[index]), width=widths[index]) for index in columns)
        table = Table(*shown, title=title or None)
        for row in rows:
            table.add_row(*(Text(row[index]) for index in columns))
        console.print(table)
        title = ""


def _folded(widths: Sequence[int], width: int) -> Iterator[list[int]]:
    """Columns of each table: the first, and as many others as fit; one at least."""
    columns, used = [0], 1 + widths[0] + _FRAME
    for index in range(1, len(widths)):
        if used + widths[index] + _FRAME > width and len(columns) > 1:
            yield columns
            columns, used = [0], 1 + widths[0] + _FRAME
        columns.append(index)
        used += widths[index] + _FRAME
    yield columns


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)
