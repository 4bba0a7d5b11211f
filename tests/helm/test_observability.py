"""Alert rules and dashboards: they parse, they fire when they should, and every metric they read exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from platformdirs import user_cache_dir
from prometheus_client.core import Metric

from cluster.engine_metrics import EngineRow, engine_metrics
from router.config import IngressConfig
from router.ingress import Ingress
from router.openai.metrics import Metrics
from router.placement.replica_view import NO_LOAD

CHART = Path(__file__).resolve().parents[2] / "helm"
RULES = CHART / "rules/alerts.yaml"
DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))
OPERATIONS = Path(__file__).resolve().parents[2] / "deploy/docs/operations.md"
OTHERS = ("ray_", "haproxy_")
"""Metrics of Ray and HAProxy; tests/helm/test_live.py scrapes them."""


@pytest.fixture(scope="session")
def promtool() -> str:
    """Prometheus's own tool: on the path, or out of Debian's package, of which nothing is installed."""
    found = shutil.which("promtool")
    if found:
        return found
    folder = Path(user_cache_dir("shoal")) / "tools" / "prometheus"
    path = folder / "usr/bin/promtool"
    if not path.exists():
        if shutil.which("apt-get") is None:
            pytest.skip("promtool is not on the path, and this is no Debian to take it from")
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", "-qq", "prometheus"], cwd=folder, check=True)
        (package,) = folder.glob("prometheus_*.deb")
        subprocess.run(["dpkg-deb", "-x", package.name, "."], cwd=folder, check=True)
        package.unlink()
    return str(path)


def expressions() -> Iterator[tuple[str, str]]:
    """Where each stands, and the expression with Grafana's variables filled in."""
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                yield f"{path.stem}: {panel['title']}", filled_in(target["expr"])


def filled_in(expr: str) -> str:
    return expr.replace("$__rate_interval", "5m").replace("$namespace", ".*").replace("$model", ".*")


def names_in(expr: str) -> set[str]:
    without_text = re.sub(r'"[^"]*"', "", expr)
    return set(re.findall(r"\b(?:shoal|ray|haproxy)_\w+", without_text))


def exported() -> set[str]:
    """Names of all series that ingresses and replicas export on their nodes."""
    metrics = Metrics(Ingress(IngressConfig(models=())), lambda: 0.0)
    families: list[Metric] = [
        *metrics.registry.collect(),
        *engine_metrics([EngineRow("a", "b", NO_LOAD)], False),
    ]
    kinds = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"], "gauge": [""]}
    return {family.name + end for family in families for end in kinds[family.type]}


def test_the_rules_are_right_and_fire_when_they_should(promtool: str) -> None:
    for arguments in (["check", "rules", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"]):
        done = subprocess.run(
            [promtool, *arguments], cwd=RULES.parent, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_test_and_a_place_in_the_handbook() -> None:
    alerts = {
        rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    }
    tests = yaml.safe_load((RULES.parent / "alerts_test.yaml").read_text())["tests"]
    tested = {one["alertname"] for test in tests for one in test["alert_rule_test"] if one["exp_alerts"]}

    assert tested == alerts
    assert {name for name in alerts if f"`{name}`" not in OPERATIONS.read_text()} == set()


def test_every_expression_parses() -> None:
    for where, expr in expressions():
        try:
            promql_parser.parse(expr)
        except ValueError as error:
            raise AssertionError(f"{where}: {error}") from error


def test_every_metric_of_ours_that_is_read_is_exported() -> None:
    known = exported()
    missing = {
        (where, name)
        for where, expr in expressions()
        for name in names_in(expr)
        if not name.startswith(OTHERS) and name not in known
    }

    assert missing == set()


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_fit_any_grafana(path: Path) -> None:
    board: dict[str, Any] = json.loads(path.read_text())
    ids = [panel["id"] for panel in board["panels"]]

    assert board["uid"] == f"shoal-{path.stem}"
    assert len(set(ids)) == len(ids)
    for panel in board["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
