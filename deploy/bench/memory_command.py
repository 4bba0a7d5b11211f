"""``shoal bench memory``"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from deploy.bench.options import JsonOption, LoadFormatOption, ModelOption, above_zero, check_context
from deploy.bench.report import environment, show_runs, write_result
from deploy.setting_values import MOST_GIB


def memory(
    model: ModelOption = None,
    prompt_len: Annotated[
        int, typer.Option(min=1, help="Of the prompt that is found in host memory.")
    ] = 8000,
    swap_space: Annotated[
        float, typer.Option(max=MOST_GIB, callback=above_zero, help="Host memory, GiB.")
    ] = 8.0,
    load_format: LoadFormatOption = "auto",
    json_path: JsonOption = None,
) -> None:
    """Copies between device and host by block size, and the first token of a prompt found in host memory."""
    from deploy.bench.pressure import check_prompt_len, measure_host_hit
    from deploy.settings import make_settings

    check_prompt_len(prompt_len, make_settings(model=model).block_size)
    check_context(model, None, prompt_len + 1, f"--prompt-len {prompt_len}")
    import torch

    from deploy.offline.llm import LLM

    result: dict[str, Any] = {"bench": "memory", "environment": environment()}
    if torch.cuda.is_available():
        from deploy.bench.copies import measure_copy_rates

        rates = [rate for kib in (64, 256, 512, 2048) for rate in measure_copy_rates(kib << 10)]
        result["copies"] = [asdict(rate) for rate in rates]
        show_runs("copies, GB/s", result["copies"])
    llm = LLM(
        model,
        load_format=load_format,
        skip_tokenizer_init=True,
        swap_space=swap_space,
        max_model_len=prompt_len + 1,
        max_num_batched_tokens=2048,
    )
    result["host_hit"] = asdict(measure_host_hit(llm, prompt_len))
    show_runs("first token", [result["host_hit"]])
    write_result(json_path, result)
    llm.close()
