"""What goes wrong with Ray on Kubernetes, and the chart must not do (KubeRay 1.7.0, read in its source)."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

if TYPE_CHECKING:
    from conftest import Helm, Values

CHART = Path(__file__).resolve().parents[2] / "helm"
EXAMPLES = sorted((CHART / "ci").glob("*-values.yaml"))
Document = dict[str, Any]

examples = pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem.removesuffix("-values"))


def rayservice(documents: list[Document]) -> Document:
    (found,) = [one for one in documents if one["kind"] == "RayService"]
    return found


def hashed(documents: list[Document]) -> Document:
    """What the operator hashes: a change makes a second cluster."""
    cluster = copy.deepcopy(rayservice(documents)["spec"]["rayClusterConfig"])
    for group in cluster["workerGroupSpecs"]:
        for name in ("replicas", "minReplicas", "maxReplicas"):
            group.pop(name, None)
    return cluster


def groups_of(documents: list[Document]) -> list[Document]:
    cluster = rayservice(documents)["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def base(**changes: Any) -> dict[str, Any]:
    groups = [{"name": "one", "gpus": 1, "maxReplicas": 4}]
    return {"models": [{"name": "a", "source": "org/a"}], "ray": {"workerGroups": groups}, **changes}


def with_version(folder: Path, version: str) -> Path:
    chart = folder / f"chart-{version}"
    shutil.copytree(CHART, chart)
    content = yaml.safe_load((chart / "Chart.yaml").read_text())
    (chart / "Chart.yaml").write_text(yaml.safe_dump({**content, "version": version}))
    return chart


# -- trap 1: what changes a hash, and what must not ---------------------------------------------------------


def test_a_new_chart_version_starts_no_second_cluster(helm: Helm, values: Values, tmp_path: Path) -> None:
    path = values(base())

    old, new = (helm.render("-f", path, chart=with_version(tmp_path, v)) for v in ("1.0.0", "1.0.1"))

    assert hashed(old) == hashed(new)
    assert old != new


@pytest.mark.parametrize(
    "changes",
    [
        {"commonLabels": {"team": "x"}, "commonAnnotations": {"owner": "me"}},
        {"observability": {"dashboards": {"enabled": True}, "prometheusRule": {"enabled": True}}},
        {"models": [{"name": "a", "source": "org/a", "replicas": 3, "engineArgs": {"max_num_seqs": 8}}]},
        {"models": [{"name": "a", "source": "org/a"}, {"name": "b", "source": "org/b"}]},
        {"router": {"replicas": 5, "policy": "least-load"}},
        {"service": {"annotations": {"a": "b"}}},
    ],
    ids=["labels", "dashboards", "engine-args", "a-second-model", "router", "service"],
)
def test_what_ray_pods_do_not_need_starts_no_second_cluster(
    helm4: Helm, values: Values, changes: dict[str, Any]
) -> None:
    before, after = helm4.render("-f", values(base())), helm4.render("-f", values(base(**changes)))

    assert hashed(before) == hashed(after)
    assert before != after


def test_a_models_settings_change_its_own_application_only(helm4: Helm, values: Values) -> None:
    def applications(**settings: Any) -> dict[str, Any]:
        models = [{"name": "a", "source": "org/a", **settings}, {"name": "b", "source": "org/b"}]
        spec = rayservice(helm4.render("-f", values(base(models=models))))["spec"]
        return {one["name"]: one for one in yaml.safe_load(spec["serveConfigV2"])["applications"]}

    before, after = applications(), applications(engineArgs={"max_num_seqs": 8})
    more = applications(replicas=3)

    assert before["model-a"]["args"] != after["model-a"]["args"]
    assert before["model-b"] == after["model-b"]
    assert (
        before["shoal-ingress"]["args"] == after["shoal-ingress"]["args"]
    )  # args restart, user_config does not
    assert before["model-a"]["args"] == more["model-a"]["args"]


# -- trap 2 and 3: labels and selectors ---------------------------------------------------------------------


@examples
def test_ray_pods_carry_none_of_the_labels_that_the_operator_or_its_hash_needs(
    helm4: Helm, example: Path
) -> None:
    for group in groups_of(helm4.render("-f", str(example))):
        names = set(group["template"]["metadata"]["labels"])
        names |= set(group["template"]["metadata"].get("annotations", {}))
        assert not names & {
            "app.kubernetes.io/name", "app.kubernetes.io/version", "app.kubernetes.io/created-by", "helm.sh/chart",
        }  # fmt: skip
        assert not any(name.startswith(("ray.io/", "checksum/")) for name in names)


@examples
def test_every_selector_matches_the_pods_it_means(helm4: Helm, example: Path) -> None:
    documents = helm4.render("-f", str(example))
    head, *workers = [group["template"]["metadata"]["labels"] for group in groups_of(documents)]

    def chosen(selector: Document) -> list[Document]:
        wanted = selector["matchLabels"].items()
        assert not any(name.startswith("ray.io/cluster") for name, _ in wanted)
        return [labels for labels in [head, *workers] if wanted <= labels.items()]

    for one in documents:
        if one["kind"] == "PodDisruptionBudget":
            assert chosen(one["spec"]["selector"]) == workers
            assert isinstance(one["spec"]["minAvailable"], int)
        elif one["kind"] == "PodMonitor":
            assert chosen(one["spec"]["selector"]) == [head, *workers]
        elif one["kind"] == "NetworkPolicy":
            assert chosen(one["spec"]["podSelector"]) == [head, *workers]
            assert chosen(one["spec"]["ingress"][0]["from"][0]["podSelector"]) == [head, *workers]
    for group, labels in zip(groups_of(documents)[1:], workers, strict=True):
        (spread,) = group["template"]["spec"]["topologySpreadConstraints"]
        assert chosen(spread["labelSelector"]) == [labels]


def test_two_releases_in_one_namespace_do_not_meet(helm4: Helm, values: Values) -> None:
    path = values(base())
    first, second = (helm4.render("-f", path, release=name) for name in ("one", "two"))

    policy = next(one for one in first if one["kind"] == "NetworkPolicy")
    wanted = policy["spec"]["podSelector"]["matchLabels"].items()
    assert not any(wanted <= group["template"]["metadata"]["labels"].items() for group in groups_of(second))


# -- traps 4 to 9 -------------------------------------------------------------------------------------------


def test_worker_groups_keep_their_order_and_a_new_one_comes_last(helm4: Helm, values: Values) -> None:
    names = ["zebra", "ant", "mole"]

    def groups(*wanted: str) -> list[Document]:
        return groups_of(
            helm4.render(
                "-f", values(base(ray={"workerGroups": [{"name": one, "gpus": 1} for one in wanted]}))
            )
        )[1:]

    assert [one["groupName"] for one in groups(*names)] == names
    assert groups(*names, "bee")[:3] == groups(*names)


def test_replicas_are_left_to_the_autoscaler(helm4: Helm, values: Values) -> None:
    group = [{"name": "g", "gpus": 1, "minReplicas": 2, "maxReplicas": 3}]
    on = helm4.render("-f", values(base(ray={"workerGroups": group})))
    off = helm4.render("-f", values(base(ray={"workerGroups": group, "autoscaler": {"enabled": False}})))

    assert "replicas" not in groups_of(on)[1]
    assert groups_of(off)[1]["replicas"] == 2


@examples
def test_ray_start_parameters_are_strings(helm4: Helm, example: Path) -> None:
    for group in groups_of(helm4.render("-f", str(example))):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    assert groups_of(helm4.render("-f", str(example)))[0]["rayStartParams"]["num-cpus"] == "0"


@examples
def test_the_serve_service_comes_from_the_operator_under_a_fixed_name(helm4: Helm, example: Path) -> None:
    documents = helm4.render("-f", str(example))
    spec = rayservice(documents)["spec"]

    head = spec["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert "serve" in [port["name"] for port in head["ports"]]
    assert not [
        one for one in documents if one["kind"] == "Service"
    ]  # it would point at a pending cluster too
    if spec["upgradeStrategy"]["type"] == "NewClusterWithIncrementalUpgrade":
        assert "serveService" not in spec
        return
    name = spec["serveService"]["metadata"]["name"]
    for one in documents:
        if one["kind"] == "Ingress":
            backend = one["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
            assert backend == {"name": name, "port": {"name": "serve"}}
        elif one["kind"] == "HTTPRoute":
            assert one["spec"]["rules"][0]["backendRefs"][0]["name"] == name


def test_grpc_has_its_port_on_the_service_the_pods_and_in_the_policy_or_nowhere(
    helm: Helm, values: Values
) -> None:
    def ports(**ray: Any) -> tuple[list[Document], list[Document], list[Document], dict[str, Any]]:
        documents = helm.render("-f", values({"models": [{"name": "a", "source": "org/a"}], "ray": ray}))
        spec = rayservice(documents)["spec"]
        pod = groups_of(documents)[1]["template"]["spec"]["containers"][0]["ports"]
        (policy,) = [one for one in documents if one["kind"] == "NetworkPolicy"]
        ingress = yaml.safe_load(spec["serveConfigV2"])["applications"][-1]["args"]
        return spec["serveService"]["spec"]["ports"], pod, policy["spec"]["ingress"][1]["ports"], ingress

    service, pod, policy, ingress = ports(ports={"grpc": 9000})
    assert [(one["name"], one["port"]) for one in service] == [("serve", 8000), ("serve-grpc", 9000)]
    assert ("serve-grpc", 9000) in [(one["name"], one["containerPort"]) for one in pod]
    assert [one["port"] for one in policy] == [8000, 9000]
    assert ingress["grpc_port"] == 9000

    service, pod, policy, ingress = ports()
    assert "grpc" not in str([service, pod, policy, ingress])


@examples
def test_probes_need_no_shell_and_do_not_wait_for_a_model(helm4: Helm, example: Path) -> None:
    head, *workers = groups_of(helm4.render("-f", str(example)))
    raylet = {"path": "/api/local_raylet_healthz", "port": 52365}
    for group in (head, *workers):
        container = group["template"]["spec"]["containers"][0]
        assert container["livenessProbe"]["httpGet"] == raylet
        assert container["startupProbe"]["httpGet"] == raylet
    for group in workers:  # no proxy of its own, no traffic: also true of a Pod with ranks only
        ready = group["template"]["spec"]["containers"][0]["readinessProbe"]
        assert ready["httpGet"] == {"path": "/-/healthz", "port": 8000}


def test_pods_with_ranks_only_do_not_block_the_budget(helm4: Helm) -> None:
    documents = helm4.render("-f", str(CHART / "ci/two-nodes-values.yaml"))
    (budget,) = [one for one in documents if one["kind"] == "PodDisruptionBudget"]

    assert groups_of(documents)[1]["numOfHosts"] == 2
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


# -- trap 10: nothing is cut before the longest stream ------------------------------------------------------


def test_every_time_out_exceeds_the_longest_stream(helm4: Helm, values: Values) -> None:
    longest = 1234
    changes = {
        "router": {"longestStreamSeconds": longest}, "auth": {"allowAnonymous": True}, "ingress": {"enabled": True},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "g"}]},
    }  # fmt: skip
    documents = helm4.render("-f", values(base(**changes)))
    spec = rayservice(documents)["spec"]

    assert spec["rayClusterDeletionDelaySeconds"] > longest
    for group in groups_of(documents):
        pod = group["template"]["spec"]
        environment = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
        command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert pod["terminationGracePeriodSeconds"] > longest
        assert float(environment["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) > longest
        assert command[:5] == ["python", "-m", "deploy.drain_node", "--timeout-s", str(longest)]
    for application in yaml.safe_load(spec["serveConfigV2"])["applications"]:
        args = application["args"]
        assert args.get("drain_timeout_s", args.get("engine", {}).get("drain_timeout_s")) >= longest
    for one in documents:
        if one["kind"] == "Ingress":
            notes = one["metadata"]["annotations"]
            assert notes["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"
            assert int(notes["nginx.ingress.kubernetes.io/proxy-read-timeout"]) >= longest
        elif one["kind"] == "HTTPRoute":
            assert one["spec"]["rules"][0]["timeouts"] == {"request": "0s", "backendRequest": "0s"}


# -- secrets, network, scheduling ---------------------------------------------------------------------------


def test_secrets_are_mounted_by_name_and_never_written_out(helm4: Helm) -> None:
    text = helm4.template("-f", str(CHART / "ci/one-gpu-values.yaml"))
    documents = [one for one in yaml.safe_load_all(text) if one]

    assert "secretKeyRef" not in text  # an environment variable does not change with its Secret
    assert not [one for one in documents if one["kind"] == "Secret"]
    volumes = {one["name"]: one for one in groups_of(documents)[1]["template"]["spec"]["volumes"]}
    assert volumes["api-keys"]["secret"]["secretName"] == "shoal-keys"
    assert volumes["hf-token"]["secret"]["secretName"] == "hf-token"
    config = rayservice(documents)["spec"]["serveConfigV2"]
    assert "/etc/shoal/keys/keys.yaml" in config


def test_only_the_endpoint_is_open_to_everybody(helm4: Helm) -> None:
    documents = helm4.render("-f", str(CHART / "ci/minimal-values.yaml"))
    (policy,) = [one for one in documents if one["kind"] == "NetworkPolicy"]

    assert policy["spec"]["policyTypes"] == ["Ingress"]
    to_all = [rule["ports"] for rule in policy["spec"]["ingress"] if "from" not in rule]
    assert to_all == [[{"port": 8000, "protocol": "TCP"}]]
    restricted = {
        port["port"] for rule in policy["spec"]["ingress"] if "from" in rule for port in rule.get("ports", [])
    }
    assert {8265, 9400} <= restricted
    assert not restricted & {6379, 10001}  # GCS and the Ray client: Ray's own Pods only


def test_the_old_cluster_keeps_rays_own_ports_closed_by_a_token(helm4: Helm) -> None:
    documents = helm4.render("-f", str(CHART / "ci/minimal-values.yaml"))

    assert rayservice(documents)["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}


def test_models_of_another_group_are_placed_by_its_label(helm4: Helm) -> None:
    documents = helm4.render("-f", str(CHART / "ci/tp8-values.yaml"))
    groups = {one["groupName"]: one for one in groups_of(documents)[1:]}
    applications = yaml.safe_load(rayservice(documents)["spec"]["serveConfigV2"])["applications"]

    for application in applications[:-1]:
        assert groups[application["args"]["worker_group"]]["labels"] == {
            "shoal-worker-group": application["args"]["worker_group"]
        }
    eight = groups["eight"]["template"]["spec"]
    assert eight["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert eight["priorityClassName"] == "inference"
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}} in eight[
        "volumes"
    ]


def test_without_a_network_nothing_is_fetched(helm4: Helm) -> None:
    documents = helm4.render("-f", str(CHART / "ci/airgap-values.yaml"))

    assert not [one for one in documents if one["kind"] in ("Job", "PersistentVolumeClaim")]
    environment = groups_of(documents)[1]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} in environment
    image = groups_of(documents)[1]["template"]["spec"]["containers"][0]["image"]
    assert image.startswith("registry.internal/llm/shoal@sha256:")


def test_another_list_of_models_is_another_prefetch_job(helm4: Helm, values: Values) -> None:
    def job(*names: str) -> Document:
        models = [{"name": name, "source": f"org/{name}"} for name in names]
        documents = helm4.render("-f", values(base(models=models, modelCache={"enabled": True})))
        (found,) = [one for one in documents if one["kind"] == "Job"]
        return found

    one, two = job("a"), job("a", "b")
    assert one["metadata"]["name"] != two["metadata"]["name"]  # a Job's template cannot change
    assert two["spec"]["template"]["spec"]["containers"][0]["args"] == ["org/a", "org/b"]


# -- words that YAML takes for something else ---------------------------------------------------------------


@pytest.mark.parametrize("word", ["true", "on", "null", "0x1f", "007", "a:"])
def test_a_name_stays_a_word_whatever_yaml_makes_of_it(helm4: Helm, values: Values, word: str) -> None:
    group = word if word.isalpha() else "on"
    models = [{"name": word, "source": word, "workerGroup": group}]
    ray = {"workerGroups": [{"name": group, "priorityClassName": "no"}], "auth": {"existingSecret": "1"}}
    documents = helm4.render("-f", values({"models": models, "ray": ray, "fullnameOverride": group}))

    service = rayservice(documents)
    application = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]
    worker = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    assert (application["args"]["name"], application["args"]["source"]) == (word, word)
    assert (
        application["args"]["worker_group"] == worker["groupName"] == worker["labels"]["shoal-worker-group"]
    )
    assert (service["metadata"]["name"], worker["groupName"]) == (group, group)
    assert worker["template"]["spec"]["priorityClassName"] == "no"
