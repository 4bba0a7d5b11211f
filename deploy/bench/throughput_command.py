"""``shoal bench throughput``"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.bench.options import (
    MOST_TIMES,
    DtypeOption,
    JsonOption,
    LoadFormatOption,
    MaxModelLenOption,
    MaxNumSeqsOption,
    MaxTokensOption,
    ModelOption,
    QuantizationOption,
    RepeatsOption,
    above_one,
    above_zero,
    check_context,
    check_not_given,
    check_spread,
    finite,
    whole_numbers,
)
from deploy.bench.report import environment, show_runs, write_result
from deploy.setting_values import MOST_GIB
from workers.engine.errors import InvalidRequest

if TYPE_CHECKING:
    from deploy.bench.throughput import Workload

_ONLY_UNDER_PRESSURE = ("swap_space", "copy_gib_per_s")
_NEVER_UNDER_PRESSURE = ("shared_len", "spread", "temperature", "repeats")


def throughput(
    context: typer.Context,
    model: ModelOption = None,
    num_prompts: Annotated[
        str | None,
        typer.Option(
            help="Prompts at once; several runs separated by commas. (default: 1,8,32; with --kv-pressure 8,32)"
        ),
    ] = None,
    input_len: Annotated[int, typer.Option(min=1, help="Prompt tokens.")] = 128,
    output_len: Annotated[int, typer.Option(min=1, help="Output tokens.")] = 128,
    shared_len: Annotated[int, typer.Option(min=0, help="Leading prompt tokens that all prompts share.")] = 0,
    spread: Annotated[int, typer.Option(min=0, help="Lengths are uniform from this much less.")] = 0,
    temperature: Annotated[float, typer.Option(min=0, max=100, callback=finite)] = 0.0,
    repeats: RepeatsOption = 1,
    max_num_seqs: MaxNumSeqsOption = 256,
    max_model_len: MaxModelLenOption = None,
    max_num_batched_tokens: MaxTokensOption = None,
    enable_prefix_caching: Annotated[bool, typer.Option("--prefix-caching/--no-prefix-caching")] = True,
    dtype: DtypeOption = "auto",
    quantization: QuantizationOption = None,
    load_format: LoadFormatOption = "auto",
    kv_pressure: Annotated[
        float | None,
        typer.Option(
            max=MOST_TIMES,
            callback=above_one,
            help="Give the KV cache this much less than the prompts need; compare what to do.",
        ),
    ] = None,
    swap_space: Annotated[
        float | None,
        typer.Option(
            max=MOST_GIB, callback=above_zero, help="With --kv-pressure: host memory, GiB. (default: 4)"
        ),
    ] = None,
    copy_gib_per_s: Annotated[
        float | None,
        typer.Option(
            max=MOST_GIB,
            callback=above_zero,
            help="With --kv-pressure, on a CPU: rate of copies to host memory.",
        ),
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Output tokens per second of the engine alone, prefill included."""
    counts = whole_numbers(num_prompts or ("1,8,32" if kv_pressure is None else "8,32"), "--num-prompts")
    if kv_pressure is None:
        check_not_given(context, _ONLY_UNDER_PRESSURE, "without --kv-pressure: give both, or neither")
        check_spread(spread, input_len=input_len, output_len=output_len)
        if shared_len > input_len - spread:
            raise InvalidRequest(
                f"--shared-len is {shared_len}, the shortest prompt has {input_len - spread} tokens (--input-len "
                f"{input_len}, --spread {spread}): lower it",
                "shared_len",
            )
    else:
        check_not_given(context, _NEVER_UNDER_PRESSURE, "with --kv-pressure: leave it out")
    check_context(
        model, max_model_len, input_len + output_len, f"--input-len {input_len} and --output-len {output_len}"
    )
    settings: dict[str, Any] = {
        "model": model,
        "max_num_seqs": max_num_seqs,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max_num_batched_tokens,
        "enable_prefix_caching": enable_prefix_caching,
        "dtype": dtype,
        "quantization": quantization,
        "load_format": load_format,
    }
    if kv_pressure is None:
        from deploy.bench.throughput import Workload

        _measure(
            settings,
            [Workload(count, input_len, output_len, shared_len, spread, temperature) for count in counts],
            repeats,
            json_path,
        )
    else:
        from deploy.bench.pressure_command import compare_under_pressure

        settings |= {
            "max_model_len": max_model_len or input_len + output_len,
            "swap_space": 4.0 if swap_space is None else swap_space,
            "copy_gib_per_s": copy_gib_per_s,
        }
        compare_under_pressure(settings, counts, input_len + output_len, kv_pressure, json_path)


def _measure(
    settings: dict[str, Any], workloads: Sequence[Workload], repeats: int, json_path: Path | None
) -> None:
    from deploy.bench.throughput import measure_all
    from deploy.offline.llm import LLM

    result: dict[str, Any] = {"bench": "throughput", "environment": environment(), "settings": settings}
    started_s = time.perf_counter()
    llm = LLM(**settings, skip_tokenizer_init=True)
    result["start_s"] = round(time.perf_counter() - started_s, 2)
    result["workloads"] = [asdict(one) for one in workloads]
    result["runs"] = [asdict(one) for one in measure_all(llm, workloads, llm.vocab_size, repeats)]
    show_runs(f"throughput (start {result['start_s']} s)", result["runs"])
    write_result(json_path, result)
    llm.close()
