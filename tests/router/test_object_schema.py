"""Arguments are an object: schemas that allow none are known, and what else a schema allows is left out."""

from __future__ import annotations

from typing import Any

import pytest

from router.scripted_replica import ScriptedReplica
from router.text.tools.object_schema import allows_objects

LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "object"}]}}}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": ["object", "null"]},
        {"properties": {"a": {}}},
        {"enum": [5, {}]},
        {"const": {"a": 1}},
        {"anyOf": [{"type": "integer"}, {"type": "object"}]},
        {"allOf": [{"properties": {"a": {}}}, {"type": "object"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}},
        {"$ref": "#/$defs/not there"},
        {"$ref": "https://host/schema"},
        {"type": None, "enum": 5, "anyOf": []},
        LOOP,
    ],
    ids=str,
)
def test_a_schema_that_allows_an_object_passes(schema: dict[str, Any]) -> None:
    assert allows_objects(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [5]},
        {"const": None},
        {"type": "string"},
        {"type": ["integer", "null"]},
        {"type": 5},
        {"type": {"type": "object"}},
        {"type": "array", "items": {"type": "object"}},
        {"anyOf": [{"type": "integer"}, {"const": 3}]},
        {"oneOf": [{"enum": ["a"]}]},
        {"allOf": [{"type": "object"}, {"type": "integer"}]},
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"$ref": "#/$defs/c"}, "c": {"enum": [5]}}},
        {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"enum": [5]}}},
        {"anyOf": [False]},
    ],
    ids=str,
)
async def test_a_schema_that_allows_none_is_refused_whether_it_is_enforced_or_not(
    make_edge: Any, schema: dict[str, Any]
) -> None:
    edge = await make_edge(ScriptedReplica())
    good = {"type": "function", "function": {"name": "g"}}
    bad = {"type": "function", "function": {"name": "f", "parameters": schema}}

    for choice in ("auto", "required"):
        answer = await edge.chat(tools=[good, bad], tool_choice=choice)

        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "tools[1].function.parameters")
        assert "allows no object" in error["message"]
    assert not edge.replica.submits


def test_a_long_chain_of_references_is_followed_no_further_than_that() -> None:
    definitions = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(4000)}

    assert allows_objects({"$ref": "#/$defs/0", "$defs": {**definitions, "4000": {"type": "integer"}}})
