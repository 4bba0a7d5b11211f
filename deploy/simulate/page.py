"""The report as one HTML page: curves as inline SVG, nothing loaded from anywhere.

Drawn with a Jinja template, which is installed for chat templates anyway: four kinds of line charts do not
justify a plotting library, and vectors in a page can be zoomed, searched and compared byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from jinja2 import Environment

from deploy.simulate.summary import Curves, Summary

COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#17becf", "#7f7f7f")
WIDTH, HEIGHT = 520, 260
MOST_LINES = 32
"""Replicas drawn; of more, the first ones."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Run:
    """One policy's outcome."""

    name: str
    summary: Summary
    curves: Curves


@dataclass(frozen=True, slots=True)
class _Line:
    name: str
    color: str
    path: str


@dataclass(frozen=True, slots=True)
class _Chart:
    title: str
    lines: list[_Line]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]


def render_page(title: str, settings: Mapping[str, object], runs: Sequence[Run]) -> str:
    """HTML of a comparison: charts of all runs together, then each run's load by replica."""
    charts = [
        _chart("Time to first token, s: share of requests", {r.name: r.curves.ttft_cdf for r in runs}),
        _chart("Time per output token, s: share of requests", {r.name: r.curves.tpot_cdf for r in runs}),
        _chart(
            "Share of prompt tokens found cached, over time, s", {r.name: r.curves.hit_share for r in runs}
        ),
        _chart("Replicas over time, s", {r.name: r.curves.num_replicas for r in runs}),
    ]
    for run in runs:
        for what, lines in (
            ("queued tokens", run.curves.queued_tokens),
            ("running requests", run.curves.num_running),
        ):
            named = {f"replica {number}": line for number, line in enumerate(lines[:MOST_LINES])}
            charts.append(_chart(f"{run.name}: {what} by replica, over time, s", named))
    figures = {name: [asdict(run.summary)[name] for run in runs] for name in asdict(runs[0].summary)}
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_TEMPLATE).render(
        title=title,
        settings=settings,
        names=[run.name for run in runs],
        figures=figures,
        charts=charts,
        width=WIDTH,
        height=HEIGHT,
    )


def _chart(title: str, curves: Mapping[str, Points]) -> _Chart:
    points = [point for line in curves.values() for point in line]
    x_most = max((x for x, _ in points), default=0.0) or 1.0
    y_most = max((y for _, y in points), default=0.0) or 1.0
    lines = []
    for number, (name, line) in enumerate(curves.items()):
        path = " ".join(f"{x / x_most * WIDTH:.1f},{HEIGHT - y / y_most * HEIGHT:.1f}" for x, y in line)
        lines.append(_Line(name, COLORS[number % len(COLORS)], path))
    return _Chart(
        title,
        lines,
        [(WIDTH * part / 4, f"{x_most * part / 4:.3g}") for part in range(5)],
        [(HEIGHT - HEIGHT * part / 4, f"{y_most * part / 4:.3g}") for part in range(5)],
    )


_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{{ title }}</title>
<style>
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; color: #222 }
table { border-collapse: collapse; margin: 1em 0 }
td, th { padding: 2px 12px; border-bottom: 1px solid #ddd; text-align: right }
td:first-child, th:first-child { text-align: left }
figure { display: inline-block; margin: 0 1em 1em 0 }
polyline { fill: none; stroke-width: 1.3; vector-effect: non-scaling-stroke }
text { font-size: 11px; fill: #666 }
.grid { stroke: #eee }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p>{% for name, value in settings.items() %}{{ name }} {{ value }}{{ "; " if not loop.last }}{% endfor %}</p>
<table>
<tr><th></th>{% for name in names %}<th>{{ name }}</th>{% endfor %}</tr>
{% for name, values in figures.items() %}
<tr><td>{{ name }}</td>{% for value in values %}<td>{{ value }}</td>{% endfor %}</tr>
{% endfor %}
</table>
{% for chart in charts %}
<figure>
<figcaption>{{ chart.title }}</figcaption>
<svg width="{{ width + 70 }}" height="{{ height + 40 }}" viewBox="-50 -10 {{ width + 70 }} {{ height + 40 }}">
{% for y, label in chart.y_ticks %}
<line class="grid" x1="0" x2="{{ width }}" y1="{{ y }}" y2="{{ y }}"/>
<text x="-6" y="{{ y + 4 }}" text-anchor="end">{{ label }}</text>
{% endfor %}
{% for x, label in chart.x_ticks %}
<text x="{{ x }}" y="{{ height + 18 }}" text-anchor="middle">{{ label }}</text>
{% endfor %}
{% for line in chart.lines %}
<polyline points="{{ line.path }}" stroke="{{ line.color }}"><title>{{ line.name }}</title></polyline>
{% if chart.lines | length <= 8 %}
<text x="{{ width - 8 }}" y="{{ height - 10 - 14 * loop.revindex0 }}" text-anchor="end" \
style="fill: {{ line.color }}">{{ line.name }}</text>
{% endif %}
{% endfor %}
</svg>
</figure>
{% endfor %}
</body>
</html>
"""
