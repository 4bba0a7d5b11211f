"""Configurations of several models: what they mean to Serve, and what is refused before anything is deployed."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema
from typer.testing import CliRunner

from deploy.cluster_spec import ClusterSpec, read_cluster_spec
from deploy.commands import app
from deploy.deploy_command import DeployError, connect, wait_until_running
from deploy.settings import make_settings
from workers.engine.errors import InvalidRequest

FILE = """
models:
  - name: Qwen/Qwen2.5-0.5B
    source: Qwen/Qwen2.5-0.5B-Instruct
    replicas: 2
    engine: {tensor_parallel_size: 2, max_model_len: 8192}
  - name: demo
ingress: {replicas: 3, policy: least-load}
"""


def read(folder: Path, text: str) -> ClusterSpec:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return read_cluster_spec(path)


def test_each_model_is_an_application_and_serve_takes_the_whole(tmp_path: Path) -> None:
    config = read(tmp_path, FILE).serve_config()

    schema = ServeDeploySchema.model_validate(config)
    assert [one.name for one in schema.applications] == [
        "model-Qwen--Qwen2.5-0.5B",
        "model-demo",
        "shoal-ingress",
    ]


def test_neither_more_replicas_nor_another_model_restart_what_runs(tmp_path: Path) -> None:
    """Serve restarts an application's processes if its arguments change."""
    before = read(tmp_path, FILE).serve_config()["applications"]
    after = read(tmp_path, FILE.replace("replicas: 2", "replicas: 4") + "").serve_config()["applications"]
    with_third = read(
        tmp_path, FILE.replace("  - name: demo", "  - name: demo\n  - name: third")
    ).serve_config()

    assert [one["args"] for one in before] == [one["args"] for one in after]
    assert with_third["applications"][-1]["args"] == before[-1]["args"]


def test_the_endpoint_is_told_how_many_replicas_there_are_to_be_at_least(tmp_path: Path) -> None:
    text = (
        "models: [{name: a, replicas: 3}, {name: b, replicas: 2, scale: {min_replicas: 1, max_replicas: 4}}]"
    )

    ingress = read(tmp_path, text).serve_config()["applications"][-1]

    assert ingress["deployments"][0]["user_config"]["min_replicas"] == {"a": 3, "b": 1}
    assert make_settings(replicas=3).least_replicas == 3
    assert make_settings(replicas=3, min_replicas=2, max_replicas=4).least_replicas == 2


def test_a_model_that_scales_is_given_our_policy_and_may_sleep(tmp_path: Path) -> None:
    spec = read(
        tmp_path, "models: [{name: demo, scale: {min_replicas: 0, max_replicas: 4, target_ttft_s: 1}}]"
    )
    config = spec.serve_config()

    schema = ServeDeploySchema.model_validate(config)
    model, ingress = schema.applications
    scaling = model.deployments[0].autoscaling_config
    assert scaling is not None
    assert (scaling["min_replicas"], scaling["initial_replicas"], scaling["max_replicas"]) == (0, 1, 4)
    assert scaling["policy"]["policy_function"] == "cluster.autoscaling:WorkPolicy"
    assert scaling["policy"]["policy_kwargs"]["ttft_s"] == 1.0
    assert ingress.deployments[0].user_config["models"][0]["scales_to_zero"] is True


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("models: []", "models"),
        ("models: [{name: a, replicas: 3, scale: {max_replicas: 2}}]", "replicas 3 is not between"),
        ("models: [{name: a}, {name: a}]", "two models are called 'a'"),
        ("models: [{name: a/b}, {name: a--b}]", "two models are called"),
        ("models: [{name: a}]\ningress: {grpc_port: 8000}", "grpc_port and http.port are both 8000"),
        ("models: [{name: a, engine: {port: 1}}]", r"engine\.port: a model has no such setting"),
        (
            "models: [{name: a, engine: {block_size: 17}}]",
            r"models\.0: engine\.block_size is 17: .*16, 32 or 64",
        ),
        ("models: [{name: 'a b '}]", r"models\.0\.name is 'a b ': .* without blanks or / at its ends"),
        ("models: [{name: a, colour: red}]", "colour"),
        ("models: [{name: a, replicas: -1}]", r"models\.0\.replicas is -1: .* equal to 0"),
        (
            "models: [{name: a, ranks_per_node: true}]",
            r"models\.0\.ranks_per_node is True: true and false are no",
        ),
        ("models: [{name: a, replicas: yes}]", r"models\.0\.replicas is True: true and false are no"),
        ("models: [{name: a, scale: {max_replicas: true}}]", r"scale\.max_replicas is True: true and false"),
        ("models: [{name: a, scale: {max_replicas: 2, target_ttft_s: on}}]", r"target_ttft_s is True: true"),
        (
            "models: [{name: a, scale: {max_replicas: 2, target_ttft_s: .inf}}]",
            r"target_ttft_s is inf: .*finite",
        ),
        (
            "models: [{name: a, engine: {max_num_seqs: true}}]",
            r"engine\.max_num_seqs is True: true and false are no",
        ),
        ("models: [{name: a, engine: {copy_gib_per_s: 1}}]", r"engine\.copy_gib_per_s: a model has no such"),
        (
            "models: [{name: a}]\ningress: {num_cpus: true}",
            r"ingress\.num_cpus is True: true and false are no",
        ),
        ("models: [{name: a}]\nhttp: {port: true}", r"http\.port is True: true and false are no value of it"),
        (
            "models: [{name: a, engine: {swap_space: 1e300}}]",
            r"engine\.swap_space is 1e300: .* 1073741824 GiB",
        ),
        ("models: [{name: a}]\nhttp: {host: ''}", r"http\.host is '': must be an address such as"),
        ("models: [{name: a}]\nhttp: {host: 'a b'}", r"http\.host is 'a b': must be an address such as"),
        ("models: {", "no YAML"),
        ("models: [{name: a}]\ningress: {policy: luck}", "ingress.policy"),
        ("proxy_location: EveryNode\napplications: []", "configuration of Ray Serve.*`serve deploy`"),
        ("apiVersion: ray.io/v1\nkind: RayService", "Kubernetes RayService.*`kubectl apply -f`"),
        ("serveConfigV2: 'applications: []'", "serveConfigV2.*`kubectl apply -f`"),
        (
            "models: [{name: a, source: b}]\nray: {version: 2.60.0}",
            "values of the Helm chart.*`helm install -f`",
        ),
        ("- models", "the whole file"),
        ("", "the whole file"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        read(tmp_path, text)


class Scripted:
    """Answers of Ray's dashboard, one after the other."""

    def __init__(self, *states: dict[str, str]) -> None:
        self._states = list(states)

    def deploy_applications(self, config: dict[str, object]) -> None:
        raise AssertionError("not asked for here")

    def get_serve_details(self) -> dict[str, object]:
        states = self._states.pop(0) if len(self._states) > 1 else self._states[0]
        return {
            "applications": {
                name: {"status": state, "message": "Traceback:\nValueError: no such model"}
                for name, state in states.items()
            }
        }


def test_deploying_waits_for_all_and_tells_what_failed(tmp_path: Path) -> None:
    spec = read(tmp_path, "models: [{name: a}]")
    now_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    def wait(*states: dict[str, str]) -> None:
        wait_until_running(Scripted(*states), spec, 5.0, clock=lambda: now_s, sleep=sleep)

    wait(
        {},
        {"model-a": "DEPLOYING", "shoal-ingress": "RUNNING"},
        {"model-a": "RUNNING", "shoal-ingress": "RUNNING"},
    )
    with pytest.raises(DeployError, match="model-a did not start: ValueError: no such model"):
        wait({"model-a": "DEPLOY_FAILED", "shoal-ingress": "RUNNING"})
    with pytest.raises(DeployError, match="does not run after 5 s"):
        wait({"model-a": "DEPLOYING", "shoal-ingress": "RUNNING"})


def test_what_is_printed_is_the_same_configuration_without_aliases(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE)

    shown = CliRunner().invoke(app, ["deploy", str(path), "--print"])

    assert shown.exit_code == 0, shown.output
    assert yaml.safe_load(shown.stdout) == read_cluster_spec(path).serve_config()
    assert "&id" not in shown.stdout


def test_grpc_has_a_port_if_the_configuration_gives_one(tmp_path: Path) -> None:
    plain = read(tmp_path, FILE).serve_config()["applications"][-1]["args"]
    with_grpc = read(tmp_path, FILE.replace("policy: least-load", "grpc_port: 9000")).serve_config()

    assert "grpc_port" not in plain
    assert with_grpc["applications"][-1]["args"]["grpc_port"] == 9000
    with pytest.raises(InvalidRequest, match="grpc_port"):
        read(tmp_path, FILE.replace("policy: least-load", "grpc_port: 99999"))


def test_no_replicas_at_all_are_refused_where_nothing_could_wake_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"models\.0: replicas 0 without scale serves nobody"):
        read(tmp_path, "models: [{name: demo, replicas: 0}]")

    assert read(tmp_path, "models: [{name: demo, replicas: 0, scale: {min_replicas: 0, max_replicas: 1}}]")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_bytes(b"\xc2\x00\xff")

    with pytest.raises(InvalidRequest, match="is no text"):
        read_cluster_spec(path)


@pytest.mark.parametrize("address", ["banana", "localhost:8265", "http://", "http://there:99999"])
def test_what_is_no_address_is_refused_before_anything_begins(address: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE)

    result = CliRunner().invoke(app, ["deploy", str(path), "--address", address])

    assert isinstance(result.exception, InvalidRequest), result.output
    assert str(result.exception).startswith(f"--address is '{address}': it is reached by HTTP: give http://")
    assert result.output == ""


def test_an_address_where_no_dashboard_answers_is_told() -> None:
    with pytest.raises(DeployError, match="no Ray dashboard at"):
        connect("http://127.0.0.1:1")
