"""``shoal fetch``: put models into the cache, before a cluster needs them or where it has no network."""

from __future__ import annotations

from typing import Annotated

import typer

from deploy.console import stage


def fetch(models: Annotated[list[str], typer.Argument(help="Hub ids; `demo` is the demo model.")]) -> None:
    """Download MODELS into the cache (SHOAL_CACHE_DIR, HF_HOME), once."""
    from deploy.settings import make_settings
    from workers.checkpoint.source import resolve_model

    source = make_settings().source
    for model in models:
        with stage(model) as current:
            files = resolve_model(model, source, current.update)
        typer.echo(files.path)
