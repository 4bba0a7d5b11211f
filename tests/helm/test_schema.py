"""Every text and number of values.yaml has bounds: no blank name, no path out of a folder, nothing below zero."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

SCHEMA = json.loads((Path(__file__).resolve().parents[2] / "helm/values.schema.json").read_text())
FREE = {
    "commonAnnotations.*",
    "*.annotations.*",
    "*.extraEnv[].value",
    "*.rayStartParams.*",
    "*.tolerations[].value",
}
"""Texts that Kubernetes or Ray interpret, or nobody."""
MAY_BE_NEGATIVE = {"*.tolerationSeconds"}


def leaves(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Paths of all texts and numbers, as ``a.b[].*``, and what is said of each."""
    if not isinstance(schema, dict):
        return
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        yield from leaves(SCHEMA["definitions"][name], path)
    for part in schema.get("allOf", []):
        yield from leaves(part, path)
    kinds = {schema.get("type")} if not isinstance(schema.get("type"), list) else set(schema["type"])
    if kinds & {"string", "integer", "number"}:
        yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from leaves(inner, f"{path}.{name}" if path else name)
    for inner in (schema.get("additionalProperties"), *schema.get("patternProperties", {}).values()):
        yield from leaves(inner, f"{path}.*")
    yield from leaves(schema.get("items"), f"{path}[]")


def is_free(path: str, free: set[str]) -> bool:
    return any(path == one or (one.startswith("*") and path.endswith(one[1:])) for one in free)


LEAVES = dict(leaves(SCHEMA))


def takes(schema: dict[str, Any], value: object) -> bool:
    resolved = {**schema, "definitions": SCHEMA["definitions"]}
    return bool(jsonschema.Draft7Validator(resolved).is_valid(value))


def test_the_walk_finds_the_values() -> None:
    assert {"models[].source", "auth.apiKeys.key", "ray.workerGroups[].maxReplicas", "commonLabels.*"} <= set(
        LEAVES
    )
    assert len(LEAVES) > 100


@pytest.mark.parametrize("path", sorted(LEAVES))
def test_nothing_blank_and_nothing_below_zero_passes(path: str) -> None:
    schema = LEAVES[path]

    if not is_free(path, FREE):
        assert not takes(schema, " ")
        assert not takes(schema, " a")
    if not is_free(path, MAY_BE_NEGATIVE):
        assert not takes(schema, -1)


PARTS_OF_PATHS = sorted(
    path for path in LEAVES if path.endswith((".key", "existingSecret")) and "tolerations" not in path
)


@pytest.mark.parametrize("path", PARTS_OF_PATHS)
def test_what_becomes_part_of_a_path_names_one_file(path: str) -> None:
    tried = ("../x", "a/../b", "/etc", "a/b", "..", ".", "a:b")

    assert [value for value in tried if takes(LEAVES[path], value)] == []


@pytest.mark.parametrize("value", ["models", "/", "/a/../etc", "/a/./b", "/a:b", "//a", "/a/"])
def test_the_models_volume_is_mounted_at_a_plain_path(value: str) -> None:
    assert not takes(LEAVES["modelCache.mountPath"], value)
