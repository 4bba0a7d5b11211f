"""A configuration of several models, as ``shoal deploy`` takes it, and the Serve configuration that it means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from cluster.autoscaling import ScaleBounds, ScaleTargets
from cluster.config import INGRESS_APPLICATION, INGRESS_DEPLOYMENT, REPLICA_DEPLOYMENT
from deploy.durations import Seconds
from deploy.ingress_spec import IngressSpec
from deploy.model_spec import ModelSpec
from deploy.refusals import Spec, refusal, refused_path
from deploy.setting_values import Host
from workers.engine.errors import InvalidRequest


class ScaleEntry(Spec):
    """How many replicas of a model there may be; the field ``replicas`` beside it says how many are first."""

    min_replicas: int = Field(1, ge=0, le=1024)
    max_replicas: int = Field(ge=1, le=1024)
    target_ttft_s: Seconds = Field(2.0, gt=0)
    target_tpot_s: Seconds = Field(0.1, gt=0)
    downscale_delay_s: Seconds = Field(60.0, ge=0)
    scale_to_zero_delay_s: Seconds = Field(300.0, ge=0)

    def bounds(self, initial_replicas: int) -> ScaleBounds:
        """The same for Ray Serve."""
        return ScaleBounds(
            self.min_replicas,
            self.max_replicas,
            initial_replicas,
            ScaleTargets(self.target_ttft_s, self.target_tpot_s),
            self.downscale_delay_s,
            self.scale_to_zero_delay_s,
        )


class ModelEntry(ModelSpec):
    """A model and how often."""

    replicas: int = Field(1, ge=0, le=1024)
    scale: ScaleEntry | None = None
    """None: always as many."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> ModelEntry:
        scale = self.scale
        if scale is None and self.replicas == 0:
            raise ValueError(
                "replicas 0 without scale serves nobody: give at least 1, or scale with min_replicas 0"
            )
        if scale is not None and not scale.min_replicas <= self.replicas <= scale.max_replicas:
            raise ValueError(
                f"replicas {self.replicas} is not between scale.min_replicas {scale.min_replicas} and "
                f"scale.max_replicas {scale.max_replicas}"
            )
        return self

    @property
    def least_replicas(self) -> int:
        """Replicas that there are meant to be at any time."""
        return self.replicas if self.scale is None else self.scale.min_replicas

    @property
    def spec(self) -> ModelSpec:
        """The arguments of its application, which numbers of replicas are no part of."""
        given = {name: getattr(self, name) for name in ModelSpec.model_fields}
        if self.scale is not None and self.scale.min_replicas == 0:
            given["scales_to_zero"] = True
        return ModelSpec(**given)

    @property
    def deployment(self) -> dict[str, Any]:
        """Its replicas' entry in Serve's configuration: what may change without restarting one."""
        if self.scale is None:
            return {"name": REPLICA_DEPLOYMENT, "num_replicas": self.replicas}
        options = self.scale.bounds(self.replicas).serve_options()
        return {"name": REPLICA_DEPLOYMENT, "num_replicas": "auto", "autoscaling_config": options}


class IngressEntry(IngressSpec):
    """The endpoint and how many processes it has."""

    replicas: int = Field(1, ge=1, le=256)

    @property
    def spec(self) -> IngressSpec:
        """The arguments of its application."""
        return IngressSpec(**{name: getattr(self, name) for name in IngressSpec.model_fields})


class HttpEntry(Spec):
    """Where the endpoint listens, on every node that has a part in it."""

    host: Host = "0.0.0.0"
    port: int = Field(8000, ge=1, le=65535)


class ClusterSpec(Spec):
    """Everything that runs on one Ray cluster."""

    models: list[ModelEntry] = Field(min_length=1)
    ingress: IngressEntry = Field(default_factory=lambda: IngressEntry.model_validate({}))
    http: HttpEntry = Field(default_factory=lambda: HttpEntry.model_validate({}))

    @model_validator(mode="after")
    def _names_differ(self) -> ClusterSpec:
        names = [model.application_name for model in self.models]
        for model in self.models:
            if names.count(model.application_name) > 1:
                raise ValueError(f"two models are called {model.name!r}: give each its own name")
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> ClusterSpec:
        if self.ingress.grpc_port == self.http.port:
            raise ValueError(f"ingress.grpc_port and http.port are both {self.http.port}: give each its own")
        return self

    def serve_config(self) -> dict[str, Any]:
        """What ``serve deploy`` and a RayService's ``serveConfigV2`` take: an application a model, one ingress.

        A model's application says nothing of the others, so that changing one leaves the others alone.
        """
        specs = [_plain(model.spec) for model in self.models]
        models = [
            {
                "name": model.application_name,
                "route_prefix": None,
                "import_path": "deploy.serve_app:build_model",
                "args": spec,
                "deployments": [model.deployment],
            }
            for model, spec in zip(self.models, specs, strict=True)
        ]
        ingress = {
            "name": INGRESS_APPLICATION,
            "route_prefix": "/",
            "import_path": "deploy.serve_app:build_ingress",
            "args": _plain(self.ingress.spec),
            "deployments": [
                {
                    "name": INGRESS_DEPLOYMENT,
                    "num_replicas": self.ingress.replicas,
                    "user_config": {
                        "models": specs,
                        "min_replicas": {model.name: model.least_replicas for model in self.models},
                    },
                }
            ],
        }
        return {
            "proxy_location": "EveryNode",
            "http_options": {"host": self.http.host, "port": self.http.port},
            "applications": [*models, ingress],
        }


def _plain(spec: BaseModel) -> dict[str, Any]:
    return spec.model_dump(mode="json", exclude_defaults=True)


def read_cluster_spec(path: Path) -> ClusterSpec:
    """Read a configuration file (YAML or JSON).

    Raises:
        InvalidRequest: it cannot be read; the message says where it is wrong and what is allowed.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}", "config") from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"{path} is no text: give a YAML file", "config") from None
    except yaml.YAMLError as error:
        raise InvalidRequest(f"{path} is no YAML: {' '.join(str(error).split())}", "config") from None
    _refuse_other_formats(path, content)
    try:
        return ClusterSpec.model_validate(content)
    except ValidationError as error:
        where = ".".join(refused_path(error)) or "the whole file"
        raise InvalidRequest(f"{path}, {refusal(error, where)}", "config") from None


def _refuse_other_formats(path: Path, content: Any) -> None:
    """Tell those who hand over what this file becomes in the end, and not what it is made of."""
    if not isinstance(content, dict):
        return
    if "applications" in content:
        raise InvalidRequest(
            f"{path} is a configuration of Ray Serve (applications: ...): put it on the cluster with "
            "`serve deploy`; `shoal deploy` takes models, ingress and http (deploy/docs/operations.md) and writes the "
            "former with --print",
            "config",
        )
    if "apiVersion" in content or "serveConfigV2" in content:
        kind = content.get("kind", "object with serveConfigV2")
        raise InvalidRequest(
            f"{path} is a Kubernetes {kind}: give it to `kubectl apply -f`; `shoal deploy` takes models, ingress and "
            "http (deploy/docs/operations.md) for a Ray cluster that runs already",
            "config",
        )
    if isinstance(content.get("models"), list) and {"ray", "service", "image"} & content.keys():
        raise InvalidRequest(
            f"{path} are values of the Helm chart: give them to `helm install -f`; `shoal deploy` takes models, "
            "ingress and http (deploy/docs/operations.md)",
            "config",
        )
