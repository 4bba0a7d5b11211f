"""The report as one HTML page: curves as inline SVG, nothing loaded from anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from jinja2 import Environment

from deploy.simulate.chart import make_chart
from deploy.simulate.summary import Curves, Summary

MOST_LINES = 32
"""Replicas drawn; of more, the first ones."""


@dataclass(frozen=True, slots=True)
class Run:
    """One policy's outcome."""

    name: str
    summary: Summary
    curves: Curves


def render_page(title: str, settings: Mapping[str, object], runs: Sequence[Run]) -> str:
    """HTML of a comparison: charts of all runs together, then each run's load by replica."""
    charts = [
        make_chart("Time to first token, s: share of requests", {r.name: r.curves.ttft_cdf for r in runs}),
        make_chart("Time per output token, s: share of requests", {r.name: r.curves.tpot_cdf for r in runs}),
        make_chart(
            "Share of prompt tokens found cached, over time, s", {r.name: r.curves.hit_share for r in runs}
        ),
        make_chart("Replicas over time, s", {r.name: r.curves.num_replicas for r in runs}),
    ]
    for run in runs:
        for what, lines in (
            ("queued tokens", run.curves.queued_tokens),
            ("running requests", run.curves.num_running),
        ):
            named = {f"replica {number}": line for number, line in enumerate(lines[:MOST_LINES])}
            charts.append(make_chart(f"{run.name}: {what} by replica, over time, s", named))
    figures = {name: [asdict(run.summary)[name] for run in runs] for name in asdict(runs[0].summary)}
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_TEMPLATE).render(
        title=title,
        settings=settings,
        names=[run.name for run in runs],
        figures=figures,
        charts=charts,
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
{{ chart.svg | safe }}
</figure>
{% endfor %}
</body>
</html>
"""
