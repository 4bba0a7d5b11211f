"""Writes what ``engineArgs`` may hold into the chart's schema, from the settings: ``python make_engine_args.py``.

So that ``helm install`` refuses what ``shoal deploy`` would, before anything is created.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deploy.model_spec import ENGINE_SETTINGS
from deploy.settings import ServeSettings

SCHEMA = Path(__file__).resolve().parents[2] / "helm/values.schema.json"
NAMED_OTHERWISE = ("device", "dtype", "load_format", "max_model_len", "model", "served_model_name",
                   "replicas", "tensor_parallel_size")  # fmt: skip
"""What a value of the chart's own says. Any value passes here: the template names that value in its refusal."""
_KEPT = ("type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "pattern")


def engine_args() -> dict[str, Any]:
    """The schema of ``engineArgs``: the settings of a model that no other value of the chart says."""
    properties = ServeSettings.model_json_schema()["properties"]
    names = sorted(ENGINE_SETTINGS - set(NAMED_OTHERWISE))
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {name: _plain(properties[name]) for name in names}
        | dict.fromkeys(NAMED_OTHERWISE, True),
    }


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """One setting without its prose. In values, what is not wanted is left out and not null."""
    (given,) = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    plain = {key: value for key, value in given.items() if key in _KEPT}
    return plain | {"pattern": "^\\S(.*\\S)?$"} if plain == {"type": "string"} else plain


def with_engine_args(schema: dict[str, Any]) -> dict[str, Any]:
    """The chart's schema with ``engineArgs`` as it is today."""
    definitions = {**schema["definitions"], "engineArgs": engine_args()}
    return {**schema, "definitions": definitions}


if __name__ == "__main__":
    written = with_engine_args(json.loads(SCHEMA.read_text()))
    SCHEMA.write_text(json.dumps(written, indent=2) + "\n")
