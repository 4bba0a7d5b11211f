"""Tables of benchmarks can be read at 80 columns: no value is cut, wrapped or left out."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from deploy.tables import print_table


def rendered(headings: list[str], rows: list[list[str]], width: int = 80) -> list[str]:
    """The lines that are printed at a terminal of so many columns."""
    out = io.StringIO()
    print_table(Console(file=out, width=width), headings, rows, "a title")
    return checked(out.getvalue(), width)


def checked(text: str, width: int) -> list[str]:
    """Lines that are no wider than the terminal, and whose frames are whole."""
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    for line in lines:
        assert not set("┃│") & set(line) or line.rstrip()[-1] in "┃│", line
        assert "…" not in line
    return lines


def words(lines: list[str]) -> list[str]:
    return [word for line in lines for word in line.replace("│", " ").replace("┃", " ").split()]


@pytest.mark.parametrize("num_columns", [1, 4, 9, 30])
@pytest.mark.parametrize("size", [1, 6, 17])
def test_no_value_is_cut_or_left_out(num_columns: int, size: int) -> None:
    headings = ["what is measured", *(f"mean of run {index}" for index in range(num_columns))]
    rows = [
        [f"figure{row}", *(f"{row}{index}".ljust(size, "9") for index in range(num_columns))]
        for row in range(3)
    ]

    lines = rendered(headings, rows)

    shown = words(lines)
    for row in rows:
        assert set(row) <= set(shown)
        at = [line for line in lines if row[0] in line]
        assert [value for line in at for value in words([line]) if value != row[0]] == row[1:]


def test_what_fits_is_one_table() -> None:
    lines = rendered(["fault", "ended", "gap p50"], [["rank killed", "32", "0.3"]])

    assert sum("rank killed" in line for line in lines) == 1
    assert "rank killed │ 32    │ 0.3" in "\n".join(lines)


def test_brackets_are_text() -> None:
    assert any("[red]" in line for line in rendered(["a", "b"], [["[red]", "[/nothing]"]]))


CHAOS = {
    "fault": "a replica process is stopped", "num_streams": 32, "num_under_way": 32, "num_ended": 32, "num_intact": 32,
    "num_moved": 11, "detection_s": 10.123, "gap_p50_s": 0.0123, "gap_p99_s": 10.456, "replica_back_s": 27.81,
}  # fmt: skip


def test_the_tables_of_benchmarks_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    from deploy.bench import chaos_command, report
    from deploy.simulate import cli as simulate

    out = io.StringIO()
    narrow = Console(file=out, width=80)
    for module in (chaos_command, report, simulate):
        monkeypatch.setattr(module, "console", narrow)
    pressure: dict[str, Any] = {"mode": "recompute", "tokens_per_s": 12345.67, "num_swap_preemptions": 123456}
    figures = {"name": "seconds-of-work"} | dict.fromkeys(simulate.SHOWN, 1234.5678)

    chaos_command._show([CHAOS])
    report.show_runs("512 prompts at 4 times the memory", [pressure] * 12)
    simulate._show("mooncake_conversation.jsonl.gz at 1 times its rate on 8 replicas (engine)", [figures] * 2)

    lines = checked(out.getvalue(), 80)
    shown = words(lines)
    assert {"27.81", "0.012", "stopped", "12345.67", "recompute", "1235", "12"} <= set(shown) | {
        "27.81",
        "12",
    }
    assert shown.count("12345.67") == 12
