"""The command ``shoal quantize``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deploy.console import console
from workers.engine.errors import InvalidRequest


def quantize(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder or a hub id.")],
    method: Annotated[str, typer.Option(help="fp8, awq or gptq.")],
    output: Annotated[Path, typer.Option(help="Folder to write.")],
    calibration: Annotated[
        Path | None, typer.Option(help="A text like those that will be served; awq and gptq need it.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=512, help="Most calibration tokens.")] = 16384,
) -> None:
    """Write a quantized copy of MODEL that `shoal serve` and other engines load."""
    from rich.progress import Progress

    from deploy.quantize.folder import Job, quantize_folder
    from deploy.settings import make_settings
    from workers.checkpoint.source import resolve_model

    files = resolve_model(model, make_settings(model=model).source)
    if not files.path.is_dir():
        raise InvalidRequest(
            f"{files.path} is no Hugging Face folder; GGUF files are quantized already", "model"
        )
    if output.exists() and any(output.iterdir()):
        raise InvalidRequest(f"{output} exists and is not empty: name another folder", "output")
    token_ids: list[int] = []
    if calibration is not None:
        from tokenizers import Tokenizer

        try:
            text = calibration.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(
                f"--calibration {calibration} cannot be read: {error}", "calibration"
            ) from error
        tokenizer = Tokenizer.from_file(str(files.path / "tokenizer.json"))
        token_ids = tokenizer.encode(text, add_special_tokens=False).ids[:max_tokens]
    with Progress(console=console) as bar:
        task = bar.add_task(f"{files.name} to {method}", total=1.0)
        job = Job(files.path, output, method, token_ids)
        quantize_folder(job, lambda share: bar.update(task, completed=share))
    console.print(f"Wrote {output}; serve it with: shoal serve {output}")
