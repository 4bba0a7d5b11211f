"""One model as a cluster's configuration names it: the arguments of its Serve application.

``shoal deploy``, the Helm chart and plain ``serve deploy`` files all write this; ``deploy/serve_app.py`` reads it.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from pydantic import Field, model_validator

from cluster.config import ReplicaConfig, application_name
from deploy.refusals import Spec
from deploy.served_model import served_model_config
from deploy.setting_values import Name
from deploy.settings import ServeSettings, make_settings
from router.config import ServedModelConfig
from workers.checkpoint.source import resolve_model
from workers.engine.errors import InvalidRequest

_NOT_OF_A_MODEL = {
    *("model", "served_model_name", "host", "port", "replicas", "ingress_replicas", "haproxy", "policy"),
    *("device", "max_body_bytes", "replica_wait_s", "record_trace", "api_key", "api_keys", "allowed_origins"),
    *("ssl_keyfile", "ssl_certfile", "max_logprobs", "grpc_port", "min_replicas", "max_replicas"),
    *("target_ttft_s", "target_tpot_s", "downscale_delay_s", "scale_to_zero_delay_s"),
    *("copy_gib_per_s", "metrics_port", "vllm_metric_names", "log_format", "otlp_endpoint", "trace_ratio"),
}
"""Settings of ``shoal serve`` that concern the cluster or its ingress, or have a name of their own here."""

ENGINE_SETTINGS = frozenset(ServeSettings.model_fields) - _NOT_OF_A_MODEL
"""What ``engine`` may hold."""


class ModelSpec(Spec):
    """A model, how it is run, and where."""

    name: Name
    """What clients call it."""
    source: str | None = Field(None, pattern=r"^\S(.*\S)?$")
    """A path that every node has, or a hub id; None: the demo model."""
    device: str = "auto"
    """``cuda`` or ``cpu``; ``auto`` looks at the nodes there are now."""
    ranks_per_node: int | None = Field(None, ge=1, le=64)
    """Ranks that one node has room for; None: look at the nodes there are now."""
    worker_group: str | None = Field(None, pattern=r"^\S+$")
    """Only on nodes with this value of the Ray label ``shoal-worker-group``."""
    scales_to_zero: bool = False
    """Its last replica may go when nothing is asked (``min_replicas`` 0): health counts it as able to serve."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """Any flag of ``shoal serve`` that concerns the model, with underscores: ``tensor_parallel_size: 2``."""

    @model_validator(mode="after")
    def _engine_is_known(self) -> ModelSpec:
        for key in self.engine:
            if key not in ENGINE_SETTINGS:
                raise ValueError(f"engine.{key}: a model has no such setting (see shoal serve --help)")
        try:
            self.settings  # noqa: B018 - a wrong value is to be refused now
        except InvalidRequest as error:
            raise ValueError(str(error)) from None
        return self

    @functools.cached_property
    def settings(self) -> ServeSettings:
        """The flags that ``shoal serve`` would be given, on whatever host."""
        return make_settings(
            {name: f"engine.{name}" for name in self.engine} | {"model": "source"},
            model=self.source,
            served_model_name=(self.name,),
            replicas=1,
            device=self.device,
            **self.engine,
        )

    @property
    def application_name(self) -> str:
        """Its Serve application, also the group that its replicas form."""
        return application_name(self.name)

    def replica_config(self, device: str) -> ReplicaConfig:
        """What its replicas need on ``device``; each finds the model on its own host."""
        settings = self.settings.model_copy(update={"device": device})
        config = settings.replica_config(self.source or "", self.name)
        return replace(config, model=self.source, num_threads=settings.cpu_threads)

    def served_model(self) -> ServedModelConfig:
        """What an ingress on this host needs; fetches what is missing. Blocks."""
        config = served_model_config(self.settings, resolve_model(self.source, self.settings.source))
        return replace(config, scales_to_zero=self.scales_to_zero, min_replicas=None)
