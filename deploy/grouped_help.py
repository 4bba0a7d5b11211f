"""``--help`` of a command with many flags: in groups, every name whole however narrow the terminal is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typer.core import TyperCommand, TyperOption


class GroupedHelp(TyperCommand):
    """A command whose help is plain text, a section for each ``rich_help_panel`` of its options.

    Typer's own tables cut long names off at 80 columns.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write usage, what the command does, arguments and options."""
        super(TyperCommand, self).format_help(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then the groups in the order in which their first options were declared."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            panel = getattr(parameter, "rich_help_panel", None) or "Options"
            name = panel if isinstance(parameter, TyperOption) else "Arguments"
            sections.setdefault(name, []).append(record)
        self._write(formatter, sections)

    @staticmethod
    def _write(formatter: Any, sections: Mapping[str, list[tuple[str, str]]]) -> None:
        for name, rows in sections.items():
            if rows:
                with formatter.section(name):
                    formatter.write_dl(rows, col_max=36)
