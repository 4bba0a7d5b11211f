"""What a step in load comes to: arrivals by rate, and how long replicas took."""

from __future__ import annotations

from xml.etree import ElementTree

from deploy.bench.scale_step import StepPlan
from deploy.simulate.chart import make_chart


def test_the_rate_is_high_between_the_two_steps_only() -> None:
    plan = StepPlan(low_per_s=1, high_per_s=9, step_s=10, back_s=20, end_s=30)

    assert [plan.rate_at(time_s) for time_s in (0, 9.9, 10, 19.9, 20, 29)] == [1, 1, 9, 9, 1, 1]


def test_requests_arrive_at_the_rate_of_the_moment() -> None:
    plan = StepPlan(low_per_s=1, high_per_s=4, step_s=2, back_s=3, end_s=5)

    assert list(plan.arrivals()) == [1, 2, 2.25, 2.5, 2.75, 3, 4]


def test_nothing_arrives_where_the_low_rate_is_zero() -> None:
    plan = StepPlan(low_per_s=0, high_per_s=4, step_s=2, back_s=3, end_s=5)

    assert list(plan.arrivals()) == [2.25, 2.5, 2.75, 3]


def test_a_chart_stands_for_itself_as_a_file() -> None:
    chart = make_chart("a", {"one": [(0, 1), (10, 3)], "b<c": [(0, 2), (10, 2)]})

    root = ElementTree.fromstring(chart.svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 2
