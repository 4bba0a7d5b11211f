"""Values that are wrong stop the installation, with the path or the value in the message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Helm, Values

MODEL = {"name": "a", "source": "org/a"}


def merged(changes: dict[str, Any]) -> dict[str, Any]:
    return {"models": [MODEL], **changes}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"models": []}, "models"),
        ({"models": [{"name": "a"}]}, "source"),
        ({"models": [{"source": "org/a"}]}, "name"),
        ({"models": [{**MODEL, "name": "a b"}]}, "name"),
        ({"models": [{**MODEL, "pipelineParallel": 2}]}, "pipelineParallel"),
        ({"models": [{**MODEL, "dtype": "int3"}]}, "dtype"),
        ({"models": [{**MODEL, "replicas": -1}]}, "replicas"),
        ({"models": [{**MODEL, "autoscaling": {"minReplicas": 1}}]}, "maxReplicas"),
        ({"colour": "red"}, "colour"),
        ({"image": {"tag": "latest"}}, "tag"),
        ({"image": {"digest": "sha256:12"}}, "digest"),
        ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"ray": {"upgrade": {"type": "Recreate"}}}, "type"),
        ({"ray": {"head": {"rayStartParams": {"num-cpus": 0}}}}, "num-cpus"),
        ({"ray": {"workerGroups": {"a": {}}}}, "workerGroups"),
        ({"ray": {"workerGroups": [{"name": "A"}]}}, "name"),
        ({"ray": {"workerGroups": [{"name": "a", "resources": {"requests": {"cpu": "two"}}}]}}, "cpu"),
        ({"ray": {"workerGroups": [{"name": "a", "resources": {"requests": {"cpu": -2}}}]}}, "cpu"),
        ({"ray": {"workerGroups": [{"name": "a", "extraEnv": [{"name": "X", "value": 1}]}]}}, "value"),
        ({"pdb": {"minAvailable": "50%"}}, "minAvailable"),
        ({"service": {"type": "ExternalName"}}, "type"),
        ({"service": {"loadBalancerSourceRanges": ["everywhere"]}}, "loadBalancerSourceRanges"),
        ({"router": {"policy": "luck"}}, "policy"),
        ({"observability": {"tracing": {"ratio": 2}}}, "ratio"),
        ({"fullnameOverride": "7b"}, "fullnameOverride"),
        ({"models": [{**MODEL, "source": " "}]}, "source"),
        ({"models": [{**MODEL, "engineArgs": {"quantization": "foo"}}]}, "quantization"),
        ({"ray": {"workerGroups": [{"name": "a", "maxReplicas": 0}]}}, "maxReplicas"),
        ({"auth": {"apiKeys": {"existingSecret": "keys", "key": "../x"}}}, "key"),
        ({"commonLabels": {"two words": "other"}}, "commonLabels"),
        ({"service": {"annotations": {"": "x"}}}, "annotations"),
    ],
)
def test_the_schema_names_what_is_wrong(
    helm: Helm, values: Values, changes: dict[str, Any], says: str
) -> None:
    assert says in helm.refusal("-f", values(merged(changes)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"models": [{**MODEL, "replicas": 0}]}, "replicas 0 without autoscaling serves nobody"),
        (
            {"models": [{**MODEL, "tensorParallelSize": 4, "engineArgs": {"deterministic": True}}]},
            "deterministic does not cover tensorParallelSize 4",
        ),
        (
            {"models": [{**MODEL, "replicas": 5, "autoscaling": {"maxReplicas": 4}}]},
            "replicas 5 is not between autoscaling.minReplicas 1 and maxReplicas 4",
        ),
        (
            {
                "models": [{**MODEL, "tensorParallelSize": 2, "autoscaling": {"maxReplicas": 5}}],
                "ray": {"workerGroups": [{"name": "g", "gpus": 8, "maxReplicas": 1}]},
            },
            'autoscaling.maxReplicas 5 is more than worker group "g" has GPUs for (4)',
        ),
        (
            {
                "models": [{**MODEL, "tensorParallelSize": 3, "autoscaling": {"maxReplicas": 4}}],
                "ray": {"workerGroups": [{"name": "g", "gpus": 4, "maxReplicas": 3}]},
            },
            'autoscaling.maxReplicas 4 is more than worker group "g" has GPUs for (3)',
        ),
        (
            {
                "models": [{**MODEL, "tensorParallelSize": 2, "replicas": 3}],
                "ray": {"workerGroups": [{"name": "g", "gpus": 4, "maxReplicas": 1}]},
            },
            'replicas 3 is more than worker group "g" has GPUs for (2): raise its maxReplicas',
        ),
        (
            {
                "models": [{**MODEL, "replicas": 3}, {"name": "b", "source": "org/b", "replicas": 2}],
                "ray": {"workerGroups": [{"name": "g", "gpus": 4, "maxReplicas": 1}]},
            },
            'ray.workerGroups "g": its models need 5 GPUs for their replicas, it has 4',
        ),
        (
            {"models": [{**MODEL, "replicas": 2}], "ray": {"autoscaler": {"enabled": False}}},
            "raise its minReplicas (ray.autoscaler.enabled is false)",
        ),
        (
            {"ray": {"head": {"extraVolumes": [{"name": "tmp", "emptyDir": {}}]}}},
            'ray.head: extraVolumes has "tmp", a name that the chart has given',
        ),
        (
            {
                "ray": {
                    "workerGroups": [{"name": "g", "gpus": 1, "extraVolumes": [{"name": "x"}, {"name": "x"}]}]
                }
            },
            'ray.workerGroups "g": extraVolumes has "x", a name that another of them has given',
        ),
        ({"ray": {"workerGroups": [{"name": "headgroup", "gpus": 1}]}}, "give yours another name"),
        (
            {"ray": {"workerGroups": [{"name": "g", "gpus": 1, "rayStartParams": {"num-gpus": "0"}}]}},
            "rayStartParams.num-gpus is what Ray counts by, and so do models' places: set gpus instead",
        ),
        ({"ray": {"ports": {"serve": 10500}}}, "ray.ports.serve is 10500, which Ray may give"),
        ({"ray": {"ports": {"directHttp": [19000, 20500]}}}, "holds ports of Ray's worker processes"),
        (
            {"ray": {"ports": {"directHttp": [30000, 30006]}}, "router": {"replicas": 4}},
            "ray.ports.directHttp has 7 ports, router.replicas 4 need 8",
        ),
        ({"router": {"cpus": 100}}, "router.cpus 100 is more than a Pod of any worker group has (4)"),
        (
            {
                "pdb": {"minAvailable": 2},
                "ray": {"workerGroups": [{"name": "g", "gpus": 1, "maxReplicas": 2}]},
            },
            "pdb.minAvailable 2 would let no node be emptied, ever: there are at most 2",
        ),
        ({"commonLabels": {"helm.sh/chart": "other"}}, "commonLabels: helm.sh/chart is a label that"),
        ({"modelCache": {"enabled": True, "mountPath": "/etc/shoal/keys"}}, "lies in or over /etc"),
        ({"serviceAccount": {"create": False}}, "serviceAccount.name is empty"),
        (
            {"auth": {"allowAnonymous": True}, "ingress": {"enabled": True, "tls": [{"secretName": "a"}]}},
            "set ingress.host",
        ),
        ({"models": [MODEL, MODEL]}, 'two are called "a"'),
        ({"models": [{**MODEL, "workerGroup": "none"}]}, 'workerGroup "none" is none of'),
        (
            {
                "models": [{**MODEL, "tensorParallelSize": 8}],
                "ray": {"workerGroups": [{"name": "g", "gpus": 4}]},
            },
            "tensorParallelSize 8 needs more than",
        ),
        (
            {
                "models": [{**MODEL, "tensorParallelSize": 6}],
                "ray": {"workerGroups": [{"name": "g", "gpus": 4, "numOfHosts": 2}]},
            },
            "is no multiple of the 4",
        ),
        (
            {"ray": {"workerGroups": [{"name": "g", "gpus": 1, "minReplicas": 3, "maxReplicas": 2}]}},
            "minReplicas 3 exceeds maxReplicas 2",
        ),
        ({"ray": {"workerGroups": [{"name": "g"}, {"name": "g"}]}}, 'two groups are called "g"'),
        ({"service": {"type": "LoadBalancer"}}, "auth.apiKeys.existingSecret"),
        ({"service": {"type": "NodePort"}}, "auth.allowAnonymous=true"),
        ({"ingress": {"enabled": True}}, "has no keys"),
        ({"httpRoute": {"enabled": True, "parentRefs": [{"name": "g"}]}}, "has no keys"),
        ({"auth": {"allowAnonymous": True}, "httpRoute": {"enabled": True}}, "httpRoute.parentRefs"),
        ({"ray": {"upgrade": {"type": "NewClusterWithIncrementalUpgrade"}}}, "gatewayClassName"),
        (
            {
                "auth": {"allowAnonymous": True},
                "ingress": {"enabled": True},
                "ray": {"upgrade": {"type": "NewClusterWithIncrementalUpgrade"}},
            },
            "ingress.enabled and httpRoute.enabled to false",
        ),
        (
            {
                "ray": {
                    "autoscaler": {"enabled": False},
                    "upgrade": {
                        "type": "NewClusterWithIncrementalUpgrade",
                        "incremental": {"gatewayClassName": "x"},
                    },
                }
            },
            "needs ray.autoscaler.enabled",
        ),
        ({"ray": {"gcsFaultTolerance": {"enabled": True}}}, "redis.address"),
        ({"hf": {"offline": True}}, "hf.offline is on"),
    ],
)
def test_what_the_schema_cannot_say_is_refused_with_the_way_out(
    helm: Helm, values: Values, changes: dict[str, Any], says: str
) -> None:
    assert says in helm.refusal("-f", values(merged(changes)))


@pytest.mark.parametrize(
    ("ports", "says"),
    [
        ({"grpc": 8000}, "ray.ports.grpc is 8000, the port of ray.ports.serve"),
        ({"shoalMetrics": 8000}, "ray.ports.shoalMetrics is 8000, the port of ray.ports.serve"),
        ({"grpc": 9400}, "ray.ports.shoalMetrics is 9400, the port of ray.ports.grpc"),
        ({"haproxyMetrics": 9400}, "haproxyMetrics is 9400"),
        ({"serve": 8265}, "ray.ports.serve is 8265, the port of Ray's dashboard"),
        ({"grpc": 8404}, "the port of HAProxy's statistics"),
        ({"grpc": 30500}, "ray.ports.grpc is 30500, within ray.ports.directHttp 30000 to 31000"),
        ({"directHttp": [6000, 7000]}, "holds 6379, the port of Ray's GCS"),
        ({"directHttp": [31000, 30000]}, "the first port 31000 is above the last, 30000"),
        ({"serve": 0}, "serve"),
    ],
)
def test_a_port_belongs_to_one_process(helm4: Helm, values: Values, ports: dict[str, Any], says: str) -> None:
    assert says in helm4.refusal("-f", values(merged({"ray": {"ports": ports}})))


@pytest.mark.parametrize(
    ("release", "says"), [("7b", "must begin with a letter"), ("a" * 45, "a RayService takes 47")]
)
def test_a_name_that_the_operator_would_refuse_is_refused_now(
    helm: Helm, values: Values, release: str, says: str
) -> None:
    assert says in helm.refusal("-f", values(merged({})), release=release)


def test_anonymous_use_of_an_exposed_endpoint_must_be_asked_for(helm: Helm, values: Values) -> None:
    changes = {"auth": {"allowAnonymous": True}, "service": {"type": "LoadBalancer"}}

    assert helm.render("-f", values(merged(changes)))


def mount(path: str, name: str = "mine") -> dict[str, Any]:
    return {
        "extraVolumes": [{"name": "mine", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": name, "mountPath": path}],
    }


KEYS = {"auth": {"apiKeys": {"existingSecret": "keys"}}}
CACHE = {"modelCache": {"enabled": True}}


@pytest.mark.parametrize(
    ("changes", "group", "says"),
    [
        ({}, mount("/tmp"), "extraVolumeMounts: /tmp is mounted by the chart already"),
        ({}, mount("/tmp/"), "/tmp is mounted by the chart already"),
        ({}, mount("/dev/shm"), "/dev/shm is mounted by the chart already"),
        (CACHE, mount("/models"), "/models is mounted by modelCache.mountPath already"),
        (KEYS, mount("/etc/shoal/keys"), "/etc/shoal/keys is mounted by the chart already"),
        (KEYS, mount("/etc/shoal"), "/etc/shoal would hide /etc/shoal/keys of the chart"),
        ({}, mount("/opt"), "/opt lies in or over /opt/shoal"),
        ({}, mount("/"), "/ lies in or over"),
        ({}, mount("/usr"), "/usr lies in or over /usr"),
        (
            {},
            mount("/data", "yours"),
            'has "yours", which is no volume of the Pod (mine, shared-memory, tmp)',
        ),
        ({}, mount("/data", "models"), 'has "models", which is no volume of the Pod'),
        (
            {},
            {"extraVolumeMounts": [{"name": "tmp", "mountPath": path} for path in ("/data", "/data/")]},
            "/data is mounted by another of them already",
        ),
        (
            {},
            {"rayStartParams": {"metrics-export-port": "9"}},
            "rayStartParams.metrics-export-port is the chart's",
        ),
        ({}, {"rayStartParams": {"min-worker-port": "9"}}, "10002 to 19999 are kept"),
        ({}, {"rayStartParams": {"address": "a:1"}}, "rayStartParams.address is the chart's to set"),
        ({}, {"rayStartParams": {"labels": "a=b"}}, "models are placed by that"),
        ({}, {"rayStartParams": {"node-manager-port": "8000"}}, "is 8000, the port of ray.ports.serve"),
        ({}, {"rayStartParams": {"node-manager-port": "10005"}}, "10002 to 19999"),
        (
            {},
            {"rayStartParams": {"node-manager-port": "7000", "object-manager-port": "7000"}},
            "object-manager-port is 7000, the port of rayStartParams.node-manager-port",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
@pytest.mark.parametrize("is_head", [True, False], ids=["head", "workers"])
def test_what_collides_with_the_charts_own_is_refused(
    helm4: Helm, values: Values, changes: dict[str, Any], group: dict[str, Any], says: str, is_head: bool
) -> None:
    ray = {"head": group} if is_head else {"workerGroups": [{"name": "g", "gpus": 1, **group}]}

    refusal = helm4.refusal("-f", values(merged({**changes, "ray": ray})))

    assert says in refusal
    assert ("ray.head" if is_head else 'ray.workerGroups "g"') in refusal


def test_a_head_has_no_cpus_to_place_by(helm4: Helm, values: Values) -> None:
    def with_cpus(num: str) -> str:
        return values(merged({"ray": {"head": {"rayStartParams": {"num-cpus": num}}}}))

    assert "rayStartParams.num-cpus 4 would place ranks on the head" in helm4.refusal("-f", with_cpus("4"))
    assert helm4.render("-f", with_cpus("0"))


@pytest.mark.parametrize(
    "path", ["/opt", "/opt/shoal", "/opt/shoal/lib", "/usr", "/usr/share/models", "/lib"]
)
def test_a_cache_of_models_hides_nothing_of_the_image(helm4: Helm, values: Values, path: str) -> None:
    changes = {"modelCache": {"enabled": True, "mountPath": path}}

    assert "modelCache.mountPath" in helm4.refusal("-f", values(merged(changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"ray": {"head": mount("/etc/ssl/private-ca")}},
        {"ray": {"head": mount("/tmp/inner")}},
        {"ray": {"head": {"extraVolumeMounts": [{"name": "tmp", "mountPath": "/var/lib/mine"}]}}},
        {
            "ray": {
                "head": {"rayStartParams": {"node-manager-port": "7000", "object-store-memory": "1000000000"}}
            }
        },
        {"modelCache": {"enabled": True, "mountPath": "/opt/models"}},
        {"image": {"repository": "Registry.Example:5000/team/shoal"}},
        {
            "auth": {"allowAnonymous": True},
            "ingress": {
                "enabled": True,
                "host": "llm.example.com",
                "tls": [{"hosts": ["*.example.com"], "secretName": "a"}, {"secretName": "b"}],
            },
        },
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_collides_with_nothing_is_rendered(helm4: Helm, values: Values, changes: dict[str, Any]) -> None:
    assert helm4.render("-f", values(merged(changes)))


@pytest.mark.parametrize(
    "repository", ["Team/shoal", "registry.example/Team/shoal", "shoal:latest", "a//b", "a/"]
)
def test_an_image_that_no_registry_could_have_is_refused(
    helm4: Helm, values: Values, repository: str
) -> None:
    assert "repository" in helm4.refusal("-f", values(merged({"image": {"repository": repository}})))


def test_tls_is_of_the_host_that_is_served(helm4: Helm, values: Values) -> None:
    ingress = {"enabled": True, "host": "llm.example.com", "tls": [{"hosts": ["other.example.com"]}]}
    changes = {"auth": {"allowAnonymous": True}, "ingress": ingress}

    assert 'host "other.example.com" is not the one that is served' in helm4.refusal(
        "-f", values(merged(changes))
    )


def test_the_only_worker_is_not_kept_from_leaving_its_node(helm4: Helm, values: Values) -> None:
    def budgets(most: int) -> list[Any]:
        changes = {"ray": {"workerGroups": [{"name": "g", "gpus": 1, "maxReplicas": most}]}}
        return [
            one for one in helm4.render("-f", values(merged(changes))) if one["kind"] == "PodDisruptionBudget"
        ]

    assert budgets(1) == []
    assert [one["spec"]["minAvailable"] for one in budgets(2)] == [1]
