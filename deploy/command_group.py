"""The commands as a group: a value that the parser refuses is told like one that a setting refuses."""

from __future__ import annotations

from typing import Any

import typer
from pydantic import ValidationError
from typer.core import TyperGroup

from deploy.refusals import refusal
from workers.engine.errors import InvalidRequest


class Commands(TyperGroup):
    """All commands. Typer names flag and limit of a wrong value; what was given stands only in the error's cause."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for.

        Raises:
            InvalidRequest: an argument or option has a value that it cannot have; flag, value and limit are said.
        """
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            param, cause = error.param, error.__cause__
            if param is None or not isinstance(cause, ValidationError):
                raise
            name = max(param.opts, key=len) if param.param_type_name == "option" else str(param.name).upper()
            raise InvalidRequest(refusal(cause, name), param.name) from error
