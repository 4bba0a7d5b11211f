"""What a step in load comes to: arrivals by rate, and how long replicas took."""

from __future__ import annotations

from xml.etree import ElementTree

from deploy.bench.scale_step import StepPlan
from deploy.simulate.chart import make_chart


def test_the_rate_is_high_between_the_two_steps_only() -> None:
    plan = StepPlan(low_per_s=1, high_per_s=9, step_s=10, back_s=20, end_s=30)

    assert [plan.rate_at(time_s) for time_s in (0, 9.9, 10, 19.9, 20, 29)] == [1, 1, 9, 9, 1, 1]


def test_a_chart_stands_for_itself_as_a_file() -> None:
    chart = make_chart("a", {"one": [(0, 1), (10, 3)], "b<c": [(0, 2), (10, 2)]})

    root = ElementTree.fromstring(chart.svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 2
