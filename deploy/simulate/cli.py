"""``shoal simulate``: which policy, how many replicas, at what rate, answered on a laptop."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from deploy.bench.options import MOST_TIMES, check_not_given, check_order, checked_output, finite
from deploy.bench.report import environment, write_result
from deploy.console import console
from deploy.durations import MOST_S
from deploy.output_file import open_output
from deploy.tables import print_table
from router.placement.policy import POLICIES
from workers.engine.errors import InvalidRequest

SHOWN = {
    "hit_share": "hits",
    "ttft_mean_s": "TTFT mean",
    "ttft_p50_s": "p50",
    "ttft_p99_s": "p99",
    "tpot_mean_s": "TPOT",
    "num_moves": "moves",
    "slo_share": "in SLO",
    "replica_hours": "hours",
    "cpu_s": "CPU",
}
"""Figures in the table, and their headings; seconds all."""


_ONLY_WITH_RULES = ("min_replicas", "max_replicas", "start_s", "downscale_delay_s")


def simulate(
    context: typer.Context,
    trace: Annotated[Path, typer.Argument(help="JSON lines, Mooncake's or Shoal's own; .gz or not.")],
    replicas: Annotated[int, typer.Option(min=1, max=4096, help="Copies of the model.")] = 4,
    policy: Annotated[
        str, typer.Option(help="Policies to compare, separated by commas; `all` for all of them.")
    ] = "prefix",
    rate: Annotated[
        float,
        typer.Option(
            min=0.001, max=MOST_TIMES, callback=finite, help="Play the trace this many times as fast."
        ),
    ] = 1.0,
    replica_model: Annotated[
        str,
        typer.Option(
            help="A JSON file, or `engine` (Shoal's), `h200` (the same, as measured) or `fifo` (a textbook replica)."
        ),
    ] = "engine",
    ingress_replicas: Annotated[
        int, typer.Option(min=1, max=256, help="Routers that do not talk; each places every n-th request.")
    ] = 1,
    move: Annotated[
        Literal["yes", "no", "both"],
        typer.Option(
            help="Whether queued requests move to replicas that can start them sooner (policy prefix)."
        ),
    ] = "yes",
    outage: Annotated[
        list[str],
        typer.Option(help="A time without a replica, PLACE:FROM-TO: 3:600-660 kills number 3 for a minute."),
    ] = [],  # noqa: B006
    autoscale: Annotated[
        str | None,
        typer.Option(
            help="Rules to compare, separated by commas: `work` (Shoal's), `requests:N` (ongoing requests a replica), "
            "`queue:N` (waiting requests a replica). --replicas are there at first."
        ),
    ] = None,
    min_replicas: Annotated[int, typer.Option(min=1, help="With --autoscale.")] = 1,
    max_replicas: Annotated[int, typer.Option(min=1, max=4096, help="With --autoscale.")] = 16,
    start_s: Annotated[
        float,
        typer.Option(
            min=0,
            max=MOST_S,
            callback=finite,
            help="With --autoscale: seconds that a new replica takes to start.",
        ),
    ] = 30.0,
    downscale_delay_s: Annotated[
        float,
        typer.Option(
            min=0, max=MOST_S, callback=finite, help="With --autoscale: seconds of less load before one goes."
        ),
    ] = 60.0,
    target_ttft_s: Annotated[
        float, typer.Option(min=0.001, max=MOST_S, callback=finite, help="Promised time to first token.")
    ] = 2.0,
    target_tpot_s: Annotated[
        float, typer.Option(min=0.001, max=MOST_S, callback=finite, help="Promised time per output token.")
    ] = 0.1,
    max_requests: Annotated[int | None, typer.Option(min=1, help="Only the first ones. [all]")] = None,
    skip_requests: Annotated[int, typer.Option(min=0, help="Leave the first ones out.")] = 0,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", help="Add the figures to the runs in this file.", callback=checked_output),
    ] = None,
    html_path: Annotated[
        Path | None,
        typer.Option(
            "--html", help="Write curves of latency, hits and load as a page.", callback=checked_output
        ),
    ] = None,
) -> None:
    """Replay TRACE in virtual time: the router's own policies and the engine's own scheduler, no GPU."""
    if autoscale is None:
        check_not_given(context, _ONLY_WITH_RULES, "without --autoscale: give both, or neither")
    check_order("--min-replicas", min_replicas, "--max-replicas", max_replicas, is_equal_fine=True)
    from cluster.autoscaling import ScaleTargets
    from deploy.simulate.compare import Comparison
    from deploy.simulate.fleet import read_outage
    from deploy.simulate.page import render_page
    from deploy.simulate.replica_model import read_replica_model
    from deploy.simulate.scaling import ScaleSettings
    from router.trace import read_trace

    scale = ScaleSettings(
        min_replicas=min_replicas,
        max_replicas=max(max_replicas, replicas),
        start_s=start_s,
        down_delay_s=downscale_delay_s,
        targets=ScaleTargets(target_ttft_s, target_tpot_s),
    )
    comparison = Comparison(
        trace=read_trace(trace).after(skip_requests).first(max_requests).at_rate(rate),
        model=read_replica_model(replica_model),
        policies=list(POLICIES) if policy == "all" else policy.split(","),
        rules=autoscale.split(",") if autoscale else [],
        scale=scale,
        num_replicas=replicas,
        num_ingresses=ingress_replicas,
        outages=[read_outage(text, replicas) for text in outage],
        moves={"yes": [True], "no": [False], "both": [False, True]}[move],
    )
    comparison.check()
    settings: dict[str, Any] = {
        "trace": trace.name,
        "requests": len(comparison.trace.requests),
        "rate": rate,
        "replicas": replicas,
        "ingress_replicas": ingress_replicas,
        "replica_model": comparison.model.model_dump(),
        **({"skipped_requests": skip_requests} if skip_requests else {}),
        **({"outages": outage} if outage else {}),
        **({"scale": asdict(scale)} if autoscale else {}),
    }
    earlier = _earlier_runs(json_path)
    about, figures, runs = environment(), [], []
    for one, run in comparison.run():
        figures.append(one)
        runs.append(run)
    title = f"{trace.name} at {rate:g} times its rate on {replicas} replicas ({comparison.model.kind})"
    _show(title, figures)
    added = [{"environment": about, "settings": settings, **one} for one in figures]
    write_result(json_path, {"bench": "simulate", "runs": [*earlier, *added]})
    if html_path is not None:
        with open_output(html_path, "--html") as file:
            file.write(render_page(title, settings, runs))


def _show(title: str, figures: list[dict[str, Any]]) -> None:
    rows = [[one["name"], *(f"{one[name]:.4g}" for name in SHOWN)] for one in figures]
    print_table(console, ["policy", *SHOWN.values()], rows, title)


def _earlier_runs(path: Path | None) -> list[dict[str, Any]]:
    """Results of earlier calls, so that one file can hold a whole comparison.

    Raises:
        InvalidRequest: the file has something else in it.
    """
    if path is None or not path.is_file():
        return []
    try:
        text = path.read_text(encoding="utf-8")
        runs = json.loads(text)["runs"] if text else []
    except (OSError, ValueError, KeyError, TypeError):
        runs = None
    if not isinstance(runs, list):
        raise InvalidRequest(f"--json {path} holds no runs of `shoal simulate`: name another file", "json")
    return runs
