"""Grammars in the form that ``workers.grammar`` compiles: of JSON schemas, regular expressions, choices, EBNF.

White space in JSON is bounded: between two tokens of it stands nothing, a space, or a new line and its indent.
Where any amount may stand, a small model writes new lines until it runs out of tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import gbnf_to_lark

from workers.library_failure import is_failure

Schema = Mapping[str, Any] | bool


@dataclass(frozen=True, slots=True)
class WantedGrammar:
    """A grammar, and the field of a request that asked for it."""

    text: str
    param: str
    schema: Schema | None = None
    """What it was made of, where that is a JSON schema with our own white space."""


WHITESPACE = r"( |\n[ ]{0,16})?"


def json_schema_grammar(schema: Schema, whitespace: str = WHITESPACE) -> str:
    """Of JSON documents that a schema allows.

    Raises:
        ValueError: the schema is no JSON, or allows nothing.
    """
    if schema is False:
        raise ValueError("nothing can match the schema false")
    try:
        spelled = json.dumps({} if schema is True else schema, allow_nan=False)
    except ValueError:
        raise ValueError("holds NaN or Infinity, which JSON does not know") from None
    return _written(
        lambda: LLMatcher.grammar_from_json_schema(spelled, defaults={"whitespace_pattern": whitespace})
    )


def json_object_grammar(whitespace: str = WHITESPACE) -> str:
    """Of any JSON object."""
    return json_schema_grammar({"type": "object"}, whitespace)


def regex_grammar(pattern: str) -> str:
    """Of texts that a regular expression matches from end to end."""
    return _written(lambda: LLMatcher.grammar_from_regex(pattern))


def choice_grammar(choices: Sequence[str]) -> str:
    """Of some given texts: one regular expression, since llguidance follows at most 2,000 alternatives of a rule."""
    return regex_grammar("|".join(map(re.escape, choices)))


def text_grammar(text: str) -> str:
    """Of a grammar that a user wrote: Lark, or EBNF as llama.cpp and xgrammar have it (``root ::= ...``).

    Raises:
        ValueError: EBNF that cannot be read, or nothing at all.
    """
    if not text.strip():
        raise ValueError("the grammar is empty")
    if "::=" not in text:
        return text
    return _written(lambda: gbnf_to_lark(text), "the EBNF cannot be read: ")


def structural_tag_grammar(triggers: Sequence[str], structures: Sequence[tuple[str, Schema, str]]) -> str:
    """Of free text in which each trigger must go on as one of the structures: its begin, JSON, and its end.

    Raises:
        ValueError: a structure begins with none of the triggers.
    """
    tags = []
    for begin, schema, end in structures:
        trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
        if trigger is None:
            raise ValueError(f"{begin!r} begins with none of the triggers")
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=_bounded(schema), end=end))
    return _written(lambda: StructTag.to_grammar(tags))


def json_rule(schema: Schema) -> str:
    """A schema as it stands inside a Lark rule."""
    return f"%json {json.dumps(_bounded(schema))}"


def quoted(text: str) -> str:
    """A text as it stands inside a Lark rule."""
    return json.dumps(text, ensure_ascii=False)


def _written(write: Callable[[], object], prefix: str = "") -> str:
    """What llguidance makes of something.

    Raises:
        ValueError: it raises whatever it stumbles over, panics among it.
    """
    try:
        return str(write())
    except BaseException as error:
        if not is_failure(error):
            raise
        raise ValueError(f"{prefix}{error}") from error


def _bounded(schema: Schema) -> dict[str, Any]:
    """A schema with our white space; one that is just true or false as an object that says the same."""
    spelled: Mapping[str, Any] = ({} if schema else {"not": {}}) if isinstance(schema, bool) else schema
    return {**spelled, "x-guidance": {"whitespace_pattern": WHITESPACE}}
