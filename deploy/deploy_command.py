"""``shoal deploy``: put a configuration of several models on a Ray cluster that runs already."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
import yaml

from deploy.bench.options import finite
from deploy.cluster_spec import ClusterSpec, read_cluster_spec
from deploy.console import console, counted, stage
from deploy.durations import MOST_S
from deploy.setting_values import checked_url
from workers.engine.errors import InvalidRequest, ShoalError

_POLL_S = 1.0


class DeployError(ShoalError):
    """An application did not come up; the message is Serve's."""


class _PlainDumper(yaml.SafeDumper):
    """Writes what stands in two places twice, as a person would, rather than as an anchor and an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


class ServeApi(Protocol):
    """What is asked of Ray's dashboard."""

    def deploy_applications(self, config: dict[str, Any]) -> None:
        """Begin to make the cluster what ``config`` says."""

    def get_serve_details(self) -> dict[str, Any]:
        """How far it is."""


def deploy(
    config: Annotated[
        Path, typer.Argument(help="A YAML file: models, ingress, http (deploy/docs/operations.md).")
    ],
    address: Annotated[
        str, typer.Option(envvar="RAY_DASHBOARD_ADDRESS", help="Ray's dashboard.")
    ] = "http://127.0.0.1:8265",
    print_only: Annotated[
        bool, typer.Option("--print", help="Write what `serve deploy` would take, and deploy nothing.")
    ] = False,
    wait_s: Annotated[
        float,
        typer.Option(
            min=0, max=MOST_S, callback=finite, help="How long to wait for all of it to run; 0: not at all."
        ),
    ] = 1800.0,
) -> None:
    """Serve the models of CONFIG on a Ray cluster that runs already; what is there and unchanged is left alone."""
    spec = read_cluster_spec(config)
    if print_only:
        typer.echo(yaml.dump(spec.serve_config(), Dumper=_PlainDumper, sort_keys=False), nl=False)
        return
    check_address(address)
    with stage(f"{counted(len(spec.models), 'model')} to {address}") as current:
        api = connect(address)
        api.deploy_applications(spec.serve_config())
        if wait_s > 0:
            wait_until_running(api, spec, wait_s, current.update)
    console.print(
        f"Served: {', '.join(model.name for model in spec.models)}, port {spec.http.port} of every node"
    )


def wait_until_running(
    api: ServeApi,
    spec: ClusterSpec,
    wait_s: float,
    tell: Callable[[str], None] = lambda line: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return once each application of ``spec`` runs.

    Raises:
        DeployError: one failed, or did not run in time.
    """
    wait_for_applications(
        api, [one["name"] for one in spec.serve_config()["applications"]], wait_s, tell, clock, sleep
    )


def wait_for_applications(
    api: ServeApi,
    wanted: Sequence[str],
    wait_s: float,
    tell: Callable[[str], None] = lambda line: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return once each application of these names runs; raises as ``wait_until_running`` does."""
    deadline = clock() + wait_s
    while True:
        found = api.get_serve_details().get("applications", {})
        states = {name: found.get(name, {}).get("status", "NOT_STARTED") for name in wanted}
        for name, state in states.items():
            if state in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise DeployError(f"{name} did not start: {_last_line(found[name])}")
        late = [name for name, state in states.items() if state != "RUNNING"]
        if not late:
            return
        if clock() > deadline:
            raise DeployError(
                f"{late[0]} does not run after {wait_s:g} s ({states[late[0]]}): "
                f"{_last_line(found.get(late[0], {})) or 'see `serve status`'}; it may still come up"
            )
        tell(f"{len(wanted) - len(late)} of {len(wanted)} applications run")
        sleep(_POLL_S)


def _last_line(application: dict[str, Any]) -> str:
    messages = [one.get("message", "") for one in application.get("deployments", {}).values()]
    messages.append(application.get("message", ""))
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def check_address(address: str) -> None:
    """Return if a dashboard could be there.

    Raises:
        InvalidRequest: it is no address of HTTP.
    """
    try:
        checked_url(address)
    except ValueError as error:
        raise InvalidRequest(f"--address is {address!r}: {error}", "address") from None


def connect(address: str) -> ServeApi:
    """The dashboard at ``address``.

    Raises:
        DeployError: none answers there.
    """
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

    try:
        client: ServeApi = ServeSubmissionClient(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        why = " ".join(str(error).split())
        raise DeployError(
            f"no Ray dashboard at {address} ({why}): start Ray with `ray start --head`, or name it by --address; "
            "with token authentication set RAY_AUTH_MODE and RAY_AUTH_TOKEN"
        ) from None
    return client
