"""The form that offline output must have: one of them, and none that is overlooked for being empty."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.offline.structured import StructuredOutputsParams
from workers.engine.errors import InvalidRequest


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "given: none"),
        ({"json_object": False}, "given: none"),
        ({"json": {}, "regex": "a"}, "given: json, regex"),
        ({"json": False, "json_object": True}, "given: json, json_object"),
        ({"json": {}, "choice": []}, "given: json, choice"),
        ({"choice": []}, "choice is empty"),
        ({"choice": [1]}, r"choice is \[1\], it must be a list of texts"),
        ({"choice": "ab"}, "choice is 'ab', it must be a list of texts"),
        ({"regex": 5}, "regex is 5, it must be text"),
        ({"grammar": 5}, "grammar is 5, it must be text"),
    ],
    ids=str,
)
def test_forms_are_counted_whatever_they_hold(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        StructuredOutputsParams(**fields)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"json": False}, "nothing can match"),
        ({"json": ""}, "structured_outputs: "),
        ({"json": "[1]"}, "must be a JSON object"),
        ({"json": [1]}, "must be a JSON object"),
        ({"json": {"enum": [{1}]}}, "structured_outputs: "),
        ({"grammar": ""}, "the grammar is empty"),
    ],
    ids=str,
)
def test_a_form_that_cannot_be_read_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        _ = StructuredOutputsParams(**fields).text


@pytest.mark.parametrize(
    "fields",
    [{"json": {}}, {"json": "{}"}, {"json": True}, {"regex": ""}, {"json": {}, "json_object": False}],
    ids=str,
)
def test_an_empty_form_is_a_form(fields: dict[str, Any]) -> None:
    assert StructuredOutputsParams(**fields).text
