"""Line charts as SVG.

Drawn with a Jinja template, which is installed for chat templates anyway: a few kinds of line charts do not
justify a plotting library, and vectors in a page can be zoomed, searched and compared byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jinja2 import Environment

COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#17becf", "#7f7f7f")
WIDTH, HEIGHT = 520, 260

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawn chart."""

    title: str
    svg: str
    """An element that stands for itself: in a page or as a file."""


@dataclass(frozen=True, slots=True)
class _Line:
    name: str
    color: str
    path: str


def make_chart(title: str, curves: Mapping[str, Points]) -> Chart:
    """Draw curves by name on common axes that begin at zero."""
    points = [point for line in curves.values() for point in line]
    x_most = max((x for x, _ in points), default=0.0) or 1.0
    y_most = max((y for _, y in points), default=0.0) or 1.0
    lines = []
    for number, (name, line) in enumerate(curves.items()):
        path = " ".join(f"{x / x_most * WIDTH:.1f},{HEIGHT - y / y_most * HEIGHT:.1f}" for x, y in line)
        lines.append(_Line(name, COLORS[number % len(COLORS)], path))
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    svg = environment.from_string(_TEMPLATE).render(
        lines=lines,
        x_ticks=[(WIDTH * part / 4, f"{x_most * part / 4:.3g}") for part in range(5)],
        y_ticks=[(HEIGHT - HEIGHT * part / 4, f"{y_most * part / 4:.3g}") for part in range(5)],
        width=WIDTH,
        height=HEIGHT,
    )
    return Chart(title, svg)


_TEMPLATE = """\
<svg xmlns="http://www.w3.org/2000/svg" \
font-family="system-ui, sans-serif" font-size="11" fill="#666" width="{{ width + 70 }}" height="{{ height + 40 }}" \
viewBox="-50 -10 {{ width + 70 }} {{ height + 40 }}">
{% for y, label in y_ticks %}
<line stroke="#eee" x1="0" x2="{{ width }}" y1="{{ y }}" y2="{{ y }}"/>
<text x="-6" y="{{ y + 4 }}" text-anchor="end">{{ label }}</text>
{% endfor %}
{% for x, label in x_ticks %}
<text x="{{ x }}" y="{{ height + 18 }}" text-anchor="middle">{{ label }}</text>
{% endfor %}
{% for line in lines %}
<polyline points="{{ line.path }}" fill="none" stroke-width="1.3" stroke="{{ line.color }}">\
<title>{{ line.name }}</title></polyline>
{% if lines | length <= 8 %}
<text x="{{ width - 8 }}" y="{{ height - 10 - 14 * loop.revindex0 }}" text-anchor="end" \
fill="{{ line.color }}">{{ line.name }}</text>
{% endif %}
{% endfor %}
</svg>
"""
