"""Turns CustomResourceDefinitions into the JSON Schemas of this folder: ``python make_schemas.py FOLDER_OF_CRDS``.

Sources (all Apache-2.0): ray.io_rayservices.yaml of ray-project/kuberay v1.7.0, httproutes of
kubernetes-sigs/gateway-api v1.6.1, podmonitors and prometheusrules of prometheus-operator v0.93.0. Unknown fields
are refused, as the API server would drop them; Pod templates are left open here, since Pods are checked against
Kubernetes' own schema.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

CRDS = {
    "ray.io_rayservices.yaml": "RayService",
    "gateway.networking.k8s.io_httproutes.yaml": "HTTPRoute",
    "monitoring.coreos.com_podmonitors.yaml": "PodMonitor",
    "monitoring.coreos.com_prometheusrules.yaml": "PrometheusRule",
}
_POD_TEMPLATES = {
    "template",
    "securityContext",
    "serveService",
    "headService",
    "env",
    "envFrom",
    "volumeMounts",
}
_DROPPED = {"description", "default", "title", "example"}


def converted(schema: Any) -> Any:
    """One level of a CRD's schema as plain JSON Schema."""
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    result = {
        key: value
        for key, value in schema.items()
        if key not in _DROPPED and not key.startswith("x-kubernetes-") and key != "nullable"
    }
    if "pattern" in result:
        result["pattern"] = result["pattern"].replace("^(?i)", "(?i)^")  # Go's way to write it is no Python
    if "properties" in schema:
        result["properties"] = {
            name: {"type": "object"}
            if name in _POD_TEMPLATES and one.get("type") == "object"
            else converted(one)
            for name, one in schema["properties"].items()
        }
        if "additionalProperties" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            result["additionalProperties"] = False
        filled_in = {name for name, one in schema["properties"].items() if "default" in one}
        required = [name for name in schema.get("required", []) if name not in filled_in]
        result.pop("required", None)
        if required:
            result["required"] = required
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            result[key] = converted(schema[key])
    for key in ("anyOf", "allOf", "oneOf"):
        if key in schema:
            result[key] = [converted(one) for one in schema[key]]
    if schema.get("nullable") and isinstance(result.get("type"), str):
        result["type"] = [result["type"], "null"]
    return result


def main() -> None:
    """Write one file a kind beside this one."""
    for name, kind in CRDS.items():
        crd = yaml.load((Path(sys.argv[1]) / name).read_text(), yaml.CSafeLoader)
        version = next(one for one in crd["spec"]["versions"] if one["name"] == "v1")
        schema = converted(version["schema"]["openAPIV3Schema"])
        schema["properties"]["metadata"] = {"type": "object"}
        schema["properties"].pop("status", None)
        path = Path(__file__).parent / "schemas" / f"{kind}.json"
        path.write_text(json.dumps(schema, separators=(",", ":"), sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
