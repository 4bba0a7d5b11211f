"""The command ``shoal quantize``."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from deploy.console import console
from workers.checkpoint.source import ModelFiles
from workers.engine.errors import InvalidRequest


def quantize(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder or a hub id.")],
    method: Annotated[str, typer.Option(help="fp8, awq or gptq.")],
    output: Annotated[Path, typer.Option(help="Folder to write.")],
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="A text like those that will be served; awq and gptq need it, fp8 is better with it."
        ),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(help="Columns that share a step of 4 bits: 32, 64 or 128. (default: by size)"),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=512, help="Most calibration tokens.")] = 16384,
) -> None:
    """Write a quantized copy of MODEL that `shoal serve` and other engines load."""
    from rich.progress import Progress

    from deploy.quantize.check import check_method, check_output
    from deploy.quantize.folder import Job, quantize_folder
    from deploy.settings import make_settings
    from workers.checkpoint.source import resolve_model

    check_method(method)
    check_output(output)
    files = resolve_model(model, make_settings(model=model).source)
    token_ids = None if calibration is None else _token_ids(files, calibration)[:max_tokens]
    bar = Progress(console=console)
    task = bar.add_task(f"{files.name} to {method}", total=1.0)
    with ExitStack() as shown:

        def show(share: float) -> None:
            if share == 0.0:  # all is checked: what is refused shows no bar
                shown.enter_context(bar)
            bar.update(task, completed=share)

        quantize_folder(Job(files, output, method, token_ids, group_size), show)
    console.print(f"Wrote {output}; serve it with: shoal serve {output}")


def _token_ids(files: ModelFiles, calibration: Path) -> list[int]:
    from router.text.tokenizer import Tokenizer
    from workers.checkpoint.vocabulary import load_vocabulary

    try:
        text = calibration.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--calibration {calibration} cannot be read: {error}", "calibration") from error
    return Tokenizer(load_vocabulary(files)).encode(text, add_special_tokens=False)
