"""A plot as an SVG file: how much of its floor each kernel reaches. No library: it is bars and text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from deploy.output_file import open_output

_LINE, _LABEL, _BAR, _NUMBER = 18, 250, 420, 150
"""Pixels: the height of a line, the widths of label, full bar and number."""
_GOOD, _FAIR = 0.85, 0.6
_COLOURS = ("#2b8a3e", "#e8a33d", "#c0392b")


def write_shares(path: Path, title: str, kernels: Sequence[Mapping[str, Any]]) -> None:
    """Draw one bar for each of ``kernels``, as ``KernelTime`` names its fields; what beats its floor ends the scale."""
    lines = [_text(4, _LINE - 5, title, "font-weight='bold'")]
    for number, kernel in enumerate(kernels, 1):
        top, share = number * _LINE + 6, float(kernel["share_of_floor"])
        colour = _COLOURS[0 if share >= _GOOD else 1 if share >= _FAIR else 2]
        width = round(min(share, 1.0) * _BAR, 1)
        lines.append(_text(4, top + 13, f"{kernel['kernel']}, {kernel['size']}"))
        lines.append(f"<rect x='{_LABEL}' y='{top + 3}' width='{_BAR}' height='{_LINE - 5}' fill='#eeeeee'/>")
        lines.append(
            f"<rect x='{_LABEL}' y='{top + 3}' width='{width}' height='{_LINE - 5}' fill='{colour}'/>"
        )
        lines.append(_text(_LABEL + _BAR + 6, top + 13, f"{share:.0%} of floor, {kernel['us']} us"))
    size = f"width='{_LABEL + _BAR + _NUMBER}' height='{(len(kernels) + 1) * _LINE + 12}'"
    body = "\n".join(lines)
    svg = (
        f"<svg xmlns='http://www.w3.org/2000/svg' {size} font-family='sans-serif' font-size='12'>\n"
        f"<rect width='100%' height='100%' fill='white'/>\n{body}\n</svg>\n"
    )
    with open_output(path, "--plot") as file:
        file.write(svg)


def _text(x: int, y: int, text: str, style: str = "") -> str:
    return f"<text x='{x}' y='{y}' {style}>{escape(text)}</text>"
