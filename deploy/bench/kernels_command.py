"""``shoal bench kernels``"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.bench.options import JsonOption, ModelOption, check_gpus, checked_output
from deploy.bench.report import environment, write_result
from deploy.console import console
from deploy.tables import print_table


def kernels(
    model: ModelOption = None,
    json_path: JsonOption = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", help="Draw the shares here, as SVG.", callback=checked_output)
    ] = None,
) -> None:
    """Each kernel at a model's shapes against the time that its bytes or operations must take; needs a GPU."""
    check_gpus()
    import torch

    from deploy.bench.kernels import measure_ceilings, measure_kernels
    from deploy.bench.plot import write_shares
    from deploy.settings import make_settings
    from workers.checkpoint.model_config import read_model_config
    from workers.checkpoint.source import resolve_model

    settings = make_settings(model=model)
    config = read_model_config(resolve_model(settings.model, settings.source))
    ceilings = measure_ceilings()
    result: dict[str, Any] = {"bench": "kernels", "environment": environment(), "ceilings": asdict(ceilings)}
    result["kernels"] = [asdict(one) for one in measure_kernels(config, ceilings)]
    rows = [[str(value) for value in row.values()] for row in result["kernels"]]
    print_table(console, ["kernel", "size", "us", "floor us", "share"], rows, str(result["ceilings"]))
    write_result(json_path, result)
    if plot_path is not None:
        write_shares(plot_path, f"{torch.cuda.get_device_name()}: {result['ceilings']}", result["kernels"])
