"""Schemas of arguments: what lists its properties has no others."""

from __future__ import annotations

from typing import Any

import pytest

from router.text.tools.closed_schema import closed

A = {"properties": {"a": {"type": "integer"}}}
CLOSED_A = {**A, "additionalProperties": False}
FREE = {"type": "object"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "object", "properties": {}}, {"type": "object", "properties": {}, "additionalProperties": False}),
        (A, CLOSED_A),
        ({"properties": {"b": A}}, {"properties": {"b": CLOSED_A}, "additionalProperties": False}),
        ({"type": "array", "items": A}, {"type": "array", "items": CLOSED_A}),
        ({"prefixItems": [A]}, {"prefixItems": [CLOSED_A]}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED_A, {"type": "null"}]}),
        ({**FREE, "additionalProperties": A}, {**FREE, "additionalProperties": CLOSED_A}),
        ({"$ref": "#/$defs/a", "$defs": {"a": A}}, {"$ref": "#/$defs/a", "$defs": {"a": CLOSED_A}}),
        (
            {"properties": {"properties": A}},
            {"properties": {"properties": CLOSED_A}, "additionalProperties": False},
        ),
    ],
)  # fmt: skip
def test_an_object_that_lists_its_properties_has_no_others(given: Any, expected: Any) -> None:
    assert closed(given) == expected


@pytest.mark.parametrize(
    "schema",
    [
        True,
        FREE,
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": {"type": "string"}},
        {**A, "required": ["a", "b"]},
        {"const": A},
        {"default": A},
        {"allOf": [A, {"properties": {"b": {}}}]},
        {**A, "anyOf": [{"properties": {"b": {}}}, {"required": ["a"]}]},
        {"allOf": [{"$ref": "#/$defs/a"}, {"properties": {"b": {}}}], "$defs": {"a": A}},
        {**A, "$ref": "#/$defs/b", "$defs": {"b": {"properties": {"b": {}}}}},
    ],
)
def test_what_speaks_of_others_or_of_one_object_in_several_places_stays_as_it_is(schema: Any) -> None:
    assert closed(schema) == schema
