"""``shoal bench latency``"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from deploy.bench.options import (
    DtypeOption,
    JsonOption,
    LoadFormatOption,
    MaxModelLenOption,
    MaxNumSeqsOption,
    MaxTokensOption,
    ModelOption,
    QuantizationOption,
    RepeatsOption,
    check_batches,
    check_context,
    whole_numbers,
)
from deploy.bench.report import environment, show_runs, write_result


def latency(
    model: ModelOption = None,
    batch_sizes: Annotated[str, typer.Option(help="Requests at once, separated by commas.")] = "1,8,32",
    input_len: Annotated[str, typer.Option(help="Prompt tokens, separated by commas.")] = "128",
    num_steps: Annotated[
        int, typer.Option(min=0, help="Decode steps to time; 0 times the first token alone.")
    ] = 64,
    repeats: RepeatsOption = 3,
    max_num_seqs: MaxNumSeqsOption = 256,
    max_model_len: MaxModelLenOption = None,
    max_num_batched_tokens: MaxTokensOption = None,
    dtype: DtypeOption = "auto",
    quantization: QuantizationOption = None,
    load_format: LoadFormatOption = "auto",
    json_path: JsonOption = None,
) -> None:
    """Time to the first token, and of one decode step, by batch size."""
    sizes, lengths = whole_numbers(batch_sizes, "--batch-sizes"), whole_numbers(input_len, "--input-len")
    check_batches(sizes, "--batch-sizes", max_num_seqs)
    check_context(
        model,
        max_model_len,
        max(lengths) + 1 + num_steps,
        f"--input-len {input_len} and --num-steps {num_steps}",
    )
    from deploy.bench.throughput import measure_steps
    from deploy.offline.llm import LLM

    settings: dict[str, Any] = {
        "model": model,
        "max_num_seqs": max_num_seqs,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max_num_batched_tokens,
        "dtype": dtype,
        "quantization": quantization,
        "load_format": load_format,
    }
    result: dict[str, Any] = {"bench": "latency", "environment": environment(), "settings": settings}
    llm = LLM(**settings, skip_tokenizer_init=True)
    result["runs"] = [
        asdict(one)
        for length in lengths
        for one in measure_steps(llm, sizes, length, num_steps, llm.vocab_size, repeats)
    ]
    show_runs("latency", result["runs"])
    write_result(json_path, result)
    llm.close()
