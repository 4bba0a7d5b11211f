"""Schemas of arguments as functions mean them: an object that lists its properties has no others.

JSON Schema lets any object have further properties. A model that must follow a schema to its end would be free to
invent them for ever, and no function takes an argument that it does not name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.text.grammars import Schema

_COMBINED = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "not", "dependentSchemas")
"""Keywords whose schemas may list further properties of the same object."""
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalItems", "additionalProperties", "contains")


def closed(schema: Schema) -> Schema:
    """The schema with ``additionalProperties: false`` wherever it has ``properties`` and says nothing of others.

    An object whose properties are listed in several places (``allOf``, or ``anyOf`` beside ``properties``, or a
    definition in a document that has ``allOf``) stays as it is: each place would forbid what the others list.
    """
    return (
        schema if isinstance(schema, bool) else _closed(schema, is_part=False, may_combine=_combines(schema))
    )


def _closed(schema: Any, *, is_part: bool, may_combine: bool) -> Any:
    """``is_part``: another schema may speak of the same object. ``may_combine``: so it may be with definitions."""
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    is_combined = is_part or any(key in schema for key in _COMBINED)
    for key in _BY_NAME:
        if isinstance(schema.get(key), Mapping):
            is_definition = key in ("$defs", "definitions")
            found[key] = {
                name: _closed(one, is_part=is_definition and may_combine, may_combine=may_combine)
                for name, one in schema[key].items()
            }
    is_shared = is_part or "properties" in schema or "allOf" in schema or "$ref" in schema
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            shares = key != "prefixItems" and is_shared
            found[key] = [_closed(one, is_part=shares, may_combine=may_combine) for one in schema[key]]
    if isinstance(schema.get("allOf"), list):
        found["allOf"] = [_closed(one, is_part=True, may_combine=may_combine) for one in schema["allOf"]]
    for key in _SINGLE:
        if isinstance(schema.get(key), Mapping):
            found[key] = _closed(schema[key], is_part=False, may_combine=may_combine)
    if not is_combined and _lists_all(schema):
        found.setdefault("additionalProperties", False)
    return found


def _lists_all(schema: Mapping[str, Any]) -> bool:
    """True if the properties that it lists may be all that there are."""
    listed, required = schema.get("properties"), schema.get("required", ())
    if not isinstance(listed, Mapping) or not isinstance(required, list | tuple):
        return False
    if "unevaluatedProperties" in schema or "minProperties" in schema:
        return False
    return all(name in listed for name in required)


def _combines(schema: Any) -> bool:
    """True if a definition may be but a part of what is said of an object."""
    if isinstance(schema, Mapping):
        if "allOf" in schema or ("$ref" in schema and "properties" in schema):
            return True
        return any(_combines(one) for one in schema.values())
    return isinstance(schema, list) and any(_combines(one) for one in schema)
