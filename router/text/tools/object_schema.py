"""Whether a schema can be that of a function's arguments, which are an object always."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.text.grammars import Schema

_MAX_REFS = 64
"""References that are followed; what lies behind further ones is left to the grammar's compiler."""


def allows_objects(schema: Schema) -> bool:
    """False if it is plain that the schema allows no object: by its type, its values, or all of its alternatives."""
    return _allows(schema, schema, {})


def of_objects(schema: Schema) -> Schema:
    """The schema without what it allows besides objects."""
    return {**schema, "type": "object"} if isinstance(schema, Mapping) else schema


def _allows(schema: Any, root: Any, followed: dict[str, bool]) -> bool:
    """``followed``: what is known of references; True while one is looked into, as it may lead to itself."""
    if not isinstance(schema, Mapping):
        return schema is not False
    kind, values, ref = schema.get("type"), schema.get("enum"), schema.get("$ref")
    if kind is not None and "object" not in (kind if isinstance(kind, list) else [kind]):
        return False
    if isinstance(values, list) and not any(isinstance(one, Mapping) for one in values):
        return False
    if "const" in schema and not isinstance(schema["const"], Mapping):
        return False
    if isinstance(ref, str) and ref not in followed and len(followed) < _MAX_REFS:
        followed[ref] = True
        followed[ref] = _allows(_behind(ref, root), root, followed)
    if isinstance(ref, str) and not followed.get(ref, True):
        return False
    for key, decide in (("allOf", all), ("anyOf", any), ("oneOf", any)):
        parts = schema.get(key)
        if isinstance(parts, list) and parts and not decide(_allows(one, root, followed) for one in parts):
            return False
    return True


def _behind(ref: str, root: Any) -> Any:
    """The schema of a reference into the same document; True, which allows anything, if there is none."""
    place, *names = ref.split("/")
    found = root
    for name in names:
        found = (
            found.get(name.replace("~1", "/").replace("~0", "~"), True)
            if isinstance(found, Mapping)
            else True
        )
    return found if place == "#" else True
