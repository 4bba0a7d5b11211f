"""Options that several measuring commands have; files are tried before anything is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deploy.output_file import check_output, make_folder_of


def checked_output(param: typer.CallbackParam, value: Path | None) -> Path | None:
    """An option's callback: ``value``, whose folder is made.

    Raises:
        InvalidRequest: it cannot be written.
    """
    if value is not None:
        make_folder_of(value, param.opts[0])
        check_output(value, param.opts[0])
    return value


JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Write the result here.", callback=checked_output)
]
