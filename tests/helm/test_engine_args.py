"""``engineArgs``: the chart takes what ``shoal deploy`` takes, and refuses what it refuses, before anything exists."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from pydantic import ValidationError

from deploy.model_spec import ENGINE_SETTINGS, ModelSpec

sys.path.insert(0, str(Path(__file__).parent))
from make_engine_args import (
    NAMED_OTHERWISE,
    SCHEMA,
    with_engine_args,
)  # beside this file, which is no package

if TYPE_CHECKING:
    from conftest import Helm, Values

CHART_SCHEMA = json.loads(SCHEMA.read_text())
ARGS = jsonschema.Draft7Validator(CHART_SCHEMA["definitions"]["engineArgs"])
OWN = sorted(ENGINE_SETTINGS - set(NAMED_OTHERWISE))
TRIED = [
    -1,
    0,
    1,
    2,
    16,
    0.5,
    1.5,
    32,
    5000,
    1 << 21,
    True,
    False,
    "",
    "auto",
    "fp8",
    "none such",
    "http://hub",
    [],
    {},
]


def deploys(name: str, value: object) -> bool:
    """Whether ``shoal deploy`` takes a model with this setting."""
    try:
        ModelSpec.model_validate({"name": "a", "engine": {name: value}})
    except ValidationError:
        return False
    return True


def test_the_schema_is_that_of_the_settings() -> None:
    assert with_engine_args(CHART_SCHEMA) == CHART_SCHEMA, "run python tests/helm/make_engine_args.py"


@pytest.mark.parametrize("name", OWN)
def test_what_the_chart_takes_is_deployed(name: str) -> None:
    choices = CHART_SCHEMA["definitions"]["engineArgs"]["properties"][name].get("enum", [])
    taken = [value for value in [*TRIED, *choices] if ARGS.is_valid({name: value})]

    assert taken, "a setting that takes nothing"
    assert [value for value in taken if not deploys(name, value)] == []


@pytest.mark.parametrize("name", OWN)
def test_what_is_refused_at_deployment_is_refused_by_the_chart(name: str) -> None:
    refused = [value for value in TRIED if not deploys(name, value)]

    assert [value for value in refused if ARGS.is_valid({name: value})] == []


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"max_num_sqs": 8}, "max_num_sqs"),
        ({"max_num_seqs": "many"}, "max_num_seqs"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"block_size": 17}, "block_size"),
        ({"api_keys": "/etc/keys"}, "api_keys"),
        ({"metrics_port": 9000}, "metrics_port"),
        ({"max_replicas": 4}, "max_replicas"),
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"dtype": "float16"}, "use dtype"),
        ({"max_model_len": 9}, "use maxModelLen"),
    ],
)
def test_helm_names_the_setting_that_it_refuses(
    helm: Helm, values: Values, args: dict[str, Any], says: str
) -> None:
    models = [{"name": "a", "source": "org/a", "engineArgs": args}]

    assert says in helm.refusal("-f", values({"models": models}))
