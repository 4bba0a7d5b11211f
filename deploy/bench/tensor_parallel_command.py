"""``shoal bench tensor-parallel``"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from deploy.bench.options import (
    JsonOption,
    LoadFormatOption,
    MaxModelLenOption,
    MaxNumSeqsOption,
    ModelOption,
    QuantizationOption,
    RepeatsOption,
    check_batches,
    check_context,
    check_gpus,
    whole_numbers,
)
from deploy.bench.report import environment, show_runs, write_result


def tensor_parallel(
    model: ModelOption = None,
    sizes: Annotated[str, typer.Option(help="Ranks of a group, separated by commas.")] = "1,2",
    batch_sizes: Annotated[str, typer.Option(help="Rows of the decode steps.")] = "1,64,256",
    input_len: Annotated[str, typer.Option(help="Prompt tokens up to the first token.")] = "512,2048",
    num_prompts: Annotated[
        str, typer.Option(help="Prompts of 512 tokens in and 256 out at once; 0 leaves it out.")
    ] = "1000",
    repeats: RepeatsOption = 2,
    max_num_seqs: MaxNumSeqsOption = 256,
    max_model_len: MaxModelLenOption = 8192,
    load_format: LoadFormatOption = "dummy",
    quantization: QuantizationOption = None,
    json_path: JsonOption = None,
) -> None:
    """Groups of several GPUs of this machine against one: throughput, steps, share of sums over ranks; needs GPUs."""
    groups, batches = whole_numbers(sizes, "--sizes", most=64), whole_numbers(batch_sizes, "--batch-sizes")
    check_batches(batches, "--batch-sizes", max_num_seqs)
    lengths = whole_numbers(input_len, "--input-len")
    counts = [] if num_prompts == "0" else whole_numbers(num_prompts, "--num-prompts")
    check_gpus(max(groups), f"--sizes {sizes}")
    import torch

    from deploy.bench.kernels import measure_ceilings
    from deploy.bench.tensor_parallel import LONGEST_STEP, measure_group, measure_reduce
    from deploy.bench.throughput import Workload
    from deploy.settings import make_settings
    from workers.checkpoint.model_config import read_model_config
    from workers.checkpoint.source import resolve_model

    workloads = [Workload(count, 512, 256, temperature=1.0) for count in counts]
    longest = max([LONGEST_STEP, max(lengths) + 1, *(one.input_len + one.output_len for one in workloads)])
    check_context(model, max_model_len, longest, f"--input-len {input_len} and what is always measured")
    settings = make_settings(model=model)
    config = read_model_config(resolve_model(settings.model, settings.source))
    ceilings = measure_ceilings()
    torch.cuda.empty_cache()
    result: dict[str, Any] = {
        "bench": "tensor-parallel",
        "environment": environment(),
        "ceilings": asdict(ceilings),
        "reduce_us": {},
        "groups": [],
    }
    # The largest first: one rank alone runs in this process and would keep memory of a GPU.
    for size in sorted(groups, reverse=True):
        reduce = measure_reduce(size, config.hidden_size, "bfloat16") if size > 1 else []
        result["reduce_us"][str(size)] = reduce
        best_us = {
            row["num_rows"]: min(us for name, us in row.items() if name != "num_rows" and us is not None)
            for row in reduce
        }
        found = measure_group(
            size,
            {
                "model": model,
                "max_num_seqs": max_num_seqs,
                "max_model_len": max_model_len,
                "load_format": load_format,
                "quantization": quantization,
            },
            config,
            ceilings.tb_per_s * 1e12,
            best_us,
            batches,
            lengths,
            workloads,
            repeats,
        )
        result["groups"].append(asdict(found))
        write_result(json_path, result)  # what is there, should the next group fail
        if reduce:
            show_runs(f"microseconds of a sum over {size} ranks with its norm", reduce)
        show_runs(f"{size} ranks, start {found.start_s} s: decode steps", result["groups"][-1]["steps"])
        show_runs("first tokens", result["groups"][-1]["first_tokens"])
        show_runs("throughput", result["groups"][-1]["throughput"])
