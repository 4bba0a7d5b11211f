"""Everything the chart renders is what Kubernetes, KubeRay and Ray Serve take."""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from deploy.cluster_spec import ClusterSpec
from deploy.ingress_spec import IngressSpec
from deploy.model_spec import ModelSpec
from deploy.node_environment import node_environment

if TYPE_CHECKING:
    from conftest import Helm, Values

CHART = Path(__file__).resolve().parents[2] / "helm"
EXAMPLES = sorted((CHART / "ci").glob("*-values.yaml"))
KUBERNETES = ["1.28.0", "1.37.0"]  # the oldest that Chart.yaml allows, and the newest there is a schema for
Document = dict[str, Any]

examples = pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem.removesuffix("-values"))


@cache
def crd_schema(kind: str) -> Document:
    path = Path(__file__).parent / "schemas" / f"{kind}.json"
    return json.loads(path.read_text())


def of_kind(documents: list[Document], kind: str) -> Document:
    (found,) = [one for one in documents if one["kind"] == kind]
    return found


def cluster_of(documents: list[Document]) -> Document:
    return of_kind(documents, "RayService")["spec"]["rayClusterConfig"]


def pods_of(documents: list[Document]) -> list[Document]:
    """All Pods that the documents make, Ray's included, as Pods."""
    pods = []
    for one in documents:
        if one["kind"] == "Pod":
            pods.append(one)
        elif one["kind"] == "Job":
            pods.append(one["spec"]["template"])
        elif one["kind"] == "RayService":
            cluster = one["spec"]["rayClusterConfig"]
            pods += [group["template"] for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]]
    return [
        {"apiVersion": "v1", "kind": "Pod", **pod, "metadata": {"name": "pod", **pod["metadata"]}}
        for pod in pods
    ]


def ray_pods_of(documents: list[Document]) -> list[Document]:
    return [pod for pod in pods_of(documents) if "app.kubernetes.io/part-of" in pod["metadata"]["labels"]]


def serve_config(documents: list[Document]) -> Document:
    return yaml.safe_load(of_kind(documents, "RayService")["spec"]["serveConfigV2"])


# -- both Helms, every example ------------------------------------------------------------------------------


@examples
def test_the_chart_passes_lint(helm: Helm, example: Path) -> None:
    done = helm.run("lint", "--strict", str(CHART), "-f", str(example))

    assert done.returncode == 0, done.stdout + done.stderr


@examples
def test_the_notes_say_what_to_do_next(helm4: Helm, example: Path) -> None:
    done = helm4.run("install", "llm", str(CHART), "-f", str(example), "--dry-run=client")

    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("\nNOTES:\n")[2]
    assert "rayservice/llm-shoal" in notes
    assert "NOT applied" in notes  # trap: min, max and tolerations alone change nothing
    assert ("docker build" in notes) == (example.stem != "airgap-values")
    assert ("WARNING: no API keys" in notes) == ("shoal-keys" not in example.read_text())


@examples
def test_every_document_is_valid(helm: Helm, example: Path) -> None:
    for document in helm.render("-f", str(example)):
        kind = document["kind"]
        if (Path(__file__).parent / "schemas" / f"{kind}.json").exists():
            jsonschema.validate(document, crd_schema(kind))
        else:
            for version in KUBERNETES:
                kubernetes_validate.validate(document, version, strict=True)


@examples
def test_every_pod_is_valid_and_restricted(helm: Helm, example: Path) -> None:
    for pod in pods_of(helm.render("-f", str(example))):
        for version in KUBERNETES:
            kubernetes_validate.validate(pod, version, strict=True)
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["enableServiceLinks"] is False
        assert not any(spec.get(name) for name in ("hostNetwork", "hostPID", "hostIPC"))
        assert not any("hostPath" in volume for volume in spec.get("volumes", []))
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["requests"]
            assert not container["image"].endswith((":latest", ":nightly"))
            assert "@" in container["image"] or ":" in container["image"].rsplit("/", 1)[-1]


@examples
def test_serve_and_shoal_take_the_rendered_configuration(helm: Helm, example: Path) -> None:
    config = serve_config(helm.render("-f", str(example)))

    ServeDeploySchema.model_validate(config)
    *models, ingress = config["applications"]
    specs = [ModelSpec.model_validate(one["args"]) for one in models]
    IngressSpec.model_validate(ingress["args"])
    assert [one["name"] for one in models] == [spec.application_name for spec in specs]
    user_config = ingress["deployments"][0]["user_config"]
    assert user_config["models"] == [one["args"] for one in models]
    assert list(user_config["min_replicas"]) == [spec.name for spec in specs]
    names = [tuple(one["import_path"].split(":")) for one in config["applications"]]
    for module, function in names:
        assert callable(getattr(__import__(module, fromlist=[function]), function))


def test_the_chart_and_the_command_line_mean_the_same(helm: Helm, values: Values) -> None:
    rendered = serve_config(
        helm.render(
            "-f",
            values(
                {
                    "models": [
                        {
                            "name": "a/b",
                            "source": "org/b",
                            "replicas": 3,
                            "tensorParallelSize": 2,
                            "maxModelLen": 1048576,
                            "engineArgs": {"max_num_batched_tokens": 1048576, "enable_prefix_caching": False},
                        },
                        {
                            "name": "c",
                            "source": "org/c",
                            "autoscaling": {"minReplicas": 0, "maxReplicas": 3, "targetTokenSeconds": 0.05},
                        },
                    ],
                    "router": {"replicas": 2, "policy": "least-load", "longestStreamSeconds": 600},
                }
            ),
        )
    )
    engine = {
        "tensor_parallel_size": 2, "max_model_len": 1048576, "max_num_batched_tokens": 1048576,
        "enable_prefix_caching": False, "drain_timeout_s": 600, "stall_timeout_s": 60,
    }  # fmt: skip
    model = {
        "name": "a/b", "source": "org/b", "replicas": 3, "device": "cuda", "ranks_per_node": 2,
        "worker_group": "workers", "engine": engine,
    }  # fmt: skip
    scaled = {
        "name": "c", "source": "org/c", "device": "cuda", "ranks_per_node": 2, "worker_group": "workers",
        "engine": {"drain_timeout_s": 600, "stall_timeout_s": 60},
        "scale": {"min_replicas": 0, "max_replicas": 3, "target_tpot_s": 0.05},
    }  # fmt: skip
    ingress = {"replicas": 2, "policy": "least-load", "drain_timeout_s": 600}
    spec = ClusterSpec.model_validate({"models": [model, scaled], "ingress": ingress})

    expected = spec.serve_config()
    found_ingress = rendered["applications"][-1].pop("args")
    expected_ingress = expected["applications"][-1].pop("args")
    assert rendered == expected
    assert IngressSpec.model_validate(found_ingress) == IngressSpec.model_validate(expected_ingress)


def test_pods_have_the_environment_that_ray_nodes_need(helm4: Helm) -> None:
    documents = helm4.render("-f", str(CHART / "ci/minimal-values.yaml"))

    for pod in ray_pods_of(documents):
        found = {one["name"]: one["value"] for one in pod["spec"]["containers"][0]["env"]}
        assert node_environment(3600).items() <= found.items()


def test_the_chart_works_inside_another(helm: Helm, tmp_path: Path) -> None:
    umbrella = tmp_path / "umbrella"
    (umbrella / "charts").mkdir(parents=True)
    (umbrella / "charts" / "shoal").symlink_to(CHART)
    (umbrella / "Chart.yaml").write_text("apiVersion: v2\nname: umbrella\nversion: 1.0.0\n")
    (umbrella / "values.yaml").write_text("shoal: {models: [{name: a, source: org/a}]}\nglobal: {x: 1}\n")

    assert of_kind(helm.render(chart=umbrella), "RayService")["metadata"]["name"] == "llm-shoal"


def test_the_readme_has_the_values_of_today() -> None:
    spec = importlib.util.spec_from_file_location("make_readme", Path(__file__).with_name("make_readme.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    readme, text = (CHART / "README.md").read_text(), (CHART / "values.yaml").read_text()

    assert module.with_table(readme, text) == readme, "run python tests/helm/make_readme.py"
    described = {key for key, _, _ in module.rows(text)}
    assert set(yaml.safe_load(text)) <= {key.split(".")[0] for key in described}
