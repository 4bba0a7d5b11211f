"""``shoal bench structured``"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from deploy.bench.options import JsonOption, check_context
from deploy.bench.report import environment, write_result
from deploy.console import console


def structured(
    model: Annotated[str | None, typer.Option(help="A folder, a .gguf file or a hub id.")] = None,
    num_prompts: Annotated[int, typer.Option(min=2, max=4096, help="Rows of the batch.")] = 64,
    output_len: Annotated[int, typer.Option(min=8, help="Output tokens.")] = 160,
    load_format: Annotated[str, typer.Option(help="dummy: random weights.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    json_path: JsonOption = None,
) -> None:
    """What grammars add to a decode step, and that outputs follow them. The model needs a tokenizer."""
    from deploy.bench.structured import PROMPT_LEN, measure
    from deploy.offline.llm import LLM

    longest = PROMPT_LEN + output_len
    check_context(model, None, longest, f"--output-len {output_len} and prompts of {PROMPT_LEN}")
    llm = LLM(
        model, load_format=load_format, device=device, max_model_len=longest, max_num_seqs=num_prompts,
        enable_prefix_caching=False,
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    for found in measure(llm, num_prompts, output_len):
        rows.append(asdict(found))
        console.print(
            f"{found.form}, {found.num_formed} of {num_prompts} rows: {found.step_ms} ms a step, "
            f"{found.num_broken} broken",
            highlight=False,
        )
    llm.close()
    settings = {"num_prompts": num_prompts, "output_len": output_len}
    write_result(
        json_path,
        {"bench": "structured", "environment": environment(), "model": model, **settings, "runs": rows},
    )
