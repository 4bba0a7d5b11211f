"""The form that offline output must have; field names are those of vLLM's ``StructuredOutputsParams``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from router.openai.structured import parsed_schema
from router.text.grammars import (
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    regex_grammar,
    text_grammar,
)
from workers.engine.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one form.

    Raises:
        InvalidRequest: none or several are given, or it cannot be read.
    """

    json: dict[str, Any] | bool | str | None = None
    """A JSON schema, or its text."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """Lark or EBNF."""
    json_object: bool | None = None
    """False asks for nothing."""

    def __post_init__(self) -> None:
        """Check that one is given."""
        given = [name for name in self.__slots__ if getattr(self, name) is not None]
        if self.json_object is False:
            given.remove("json_object")
        if len(given) != 1:
            raise InvalidRequest(
                f"structured_outputs needs one of {', '.join(self.__slots__)}; given: {', '.join(given) or 'none'}",
                "structured_outputs",
            )
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            if text is not None and not isinstance(text, str):
                raise InvalidRequest(
                    f"structured_outputs.{name} is {text!r}, it must be text", "structured_outputs"
                )
        choice = self.choice
        if choice is not None and not (
            isinstance(choice, list | tuple) and all(isinstance(one, str) for one in choice)
        ):
            raise InvalidRequest(
                f"structured_outputs.choice is {choice!r}, it must be a list of texts", "structured_outputs"
            )
        if self.choice is not None and not self.choice:
            raise InvalidRequest(
                "structured_outputs.choice is empty: nothing could be said", "structured_outputs"
            )

    @property
    def text(self) -> str:
        """The grammar, as the engine takes it."""
        try:
            if self.json is not None:
                return json_schema_grammar(parsed_schema(self.json))
            if self.regex is not None:
                return regex_grammar(self.regex)
            if self.choice is not None:
                return choice_grammar(self.choice)
            return text_grammar(self.grammar) if self.grammar is not None else json_object_grammar()
        except (ValueError, TypeError, RecursionError) as error:  # callers of Python may give anything
            raise InvalidRequest(f"structured_outputs: {error}", "structured_outputs") from error
