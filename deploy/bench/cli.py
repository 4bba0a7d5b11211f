"""``shoal bench ...``"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.bench.chaos_command import chaos
from deploy.bench.fairness_command import fairness
from deploy.bench.options import JsonOption
from deploy.bench.perplexity_command import perplexity
from deploy.bench.report import environment, show_runs, write_result
from deploy.bench.scale_step_command import scale_step
from deploy.bench.soak_command import soak
from deploy.bench.structured_command import structured
from deploy.console import console
from deploy.tables import print_table
from workers.engine.errors import InvalidRequest

app = typer.Typer(
    help="Measure this machine; results as a table and, with --json, as a file.", no_args_is_help=True
)
app.command()(soak)
app.command()(structured)
app.command()(perplexity)
app.command()(scale_step)
app.command()(chaos)
app.command()(fairness)

ModelOption = Annotated[
    str | None, typer.Option(help="A folder, a .gguf file or a hub id. (default: the demo model)")
]
MaxNumSeqsOption = Annotated[int, typer.Option(help="Most requests in a step.")]
MaxModelLenOption = Annotated[int | None, typer.Option(help="Most tokens of prompt and output.")]
MaxTokensOption = Annotated[
    int | None, typer.Option("--max-num-batched-tokens", help="Most tokens in a step.")
]
QuantizationOption = Annotated[str | None, typer.Option(help="Quantize full weights at load.")]
DtypeOption = Annotated[str, typer.Option()]
LoadFormatOption = Annotated[str, typer.Option(help="auto, gguf, safetensors, or dummy for random weights.")]
RepeatsOption = Annotated[int, typer.Option(help="Runs of each; the best counts.")]


@app.command()
def throughput(
    model: ModelOption = None,
    num_prompts: Annotated[
        str, typer.Option(help="Prompts at once; several runs separated by commas.")
    ] = "1,8,32",
    input_len: Annotated[int, typer.Option(help="Prompt tokens.")] = 128,
    output_len: Annotated[int, typer.Option(help="Output tokens.")] = 128,
    shared_len: Annotated[int, typer.Option(help="Leading prompt tokens that all prompts share.")] = 0,
    spread: Annotated[int, typer.Option(help="Lengths are uniform from this much less.")] = 0,
    temperature: Annotated[float, typer.Option()] = 0.0,
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
            min=1.0, help="Give the KV cache this much less than the prompts need; compare what to do."
        ),
    ] = None,
    swap_space: Annotated[float | None, typer.Option(help="With --kv-pressure: host memory, GiB.")] = None,
    copy_gib_per_s: Annotated[
        float | None, typer.Option(help="With --kv-pressure, on a CPU: rate of copies to host memory.")
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Output tokens per second of the engine alone, prefill included."""
    if kv_pressure is not None:
        from deploy.bench.pressure_command import compare_under_pressure

        compare_under_pressure(
            {
                "model": model,
                "max_num_seqs": max_num_seqs,
                "max_model_len": max_model_len or input_len + output_len,
                "max_num_batched_tokens": max_num_batched_tokens,
                "enable_prefix_caching": enable_prefix_caching,
                "dtype": dtype,
                "quantization": quantization,
                "load_format": load_format,
                "swap_space": 4.0 if swap_space is None else swap_space,
                "copy_gib_per_s": copy_gib_per_s,
            },
            _numbers(num_prompts, "num_prompts"),
            input_len + output_len,
            kv_pressure,
            json_path,
        )
        return
    from deploy.bench.throughput import Workload, measure_all
    from deploy.offline.llm import LLM

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
    result: dict[str, Any] = {"bench": "throughput", "environment": environment(), "settings": settings}
    started_s = time.perf_counter()
    llm = LLM(**settings, skip_tokenizer_init=True)
    result["start_s"] = round(time.perf_counter() - started_s, 2)
    workloads = [
        Workload(count, input_len, output_len, shared_len, spread, temperature)
        for count in _numbers(num_prompts, "num_prompts")
    ]
    result["workloads"] = [asdict(one) for one in workloads]
    result["runs"] = [asdict(one) for one in measure_all(llm, workloads, llm.vocab_size, repeats)]
    show_runs(f"throughput (start {result['start_s']} s)", result["runs"])
    write_result(json_path, result)
    llm.close()


@app.command()
def latency(
    model: ModelOption = None,
    batch_sizes: Annotated[str, typer.Option(help="Requests at once, separated by commas.")] = "1,8,32",
    input_len: Annotated[str, typer.Option(help="Prompt tokens, separated by commas.")] = "128",
    num_steps: Annotated[int, typer.Option(help="Decode steps to time; 0 times the first token alone.")] = 64,
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
    sizes = _numbers(batch_sizes, "batch_sizes")
    result["runs"] = [
        asdict(one)
        for length in _numbers(input_len, "input_len")
        for one in measure_steps(llm, sizes, length, num_steps, llm.vocab_size, repeats)
    ]
    show_runs("latency", result["runs"])
    write_result(json_path, result)
    llm.close()


@app.command("tensor-parallel")
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
    import torch

    from deploy.bench.kernels import measure_ceilings
    from deploy.bench.tensor_parallel import measure_group, measure_reduce
    from deploy.bench.throughput import Workload
    from deploy.settings import make_settings
    from workers.checkpoint.model_config import read_model_config
    from workers.checkpoint.source import resolve_model

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
    workloads = [
        Workload(count, 512, 256, temperature=1.0)
        for count in ([] if num_prompts == "0" else _numbers(num_prompts, "num_prompts"))
    ]
    # The largest first: one rank alone runs in this process and would keep memory of a GPU.
    for size in sorted(_numbers(sizes, "sizes"), reverse=True):
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
            _numbers(batch_sizes, "batch_sizes"),
            _numbers(input_len, "input_len"),
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


@app.command()
def kernels(
    model: ModelOption = None,
    json_path: JsonOption = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="Draw the shares here, as SVG.")] = None,
) -> None:
    """Each kernel at a model's shapes against the time that its bytes or operations must take; needs a GPU."""
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


@app.command()
def http(
    url: Annotated[str, typer.Option(help="The endpoint.")] = "http://127.0.0.1:8000/v1",
    model: Annotated[str | None, typer.Option(help="(default: the first served)")] = None,
    streams: Annotated[str, typer.Option(help="Streams at once, separated by commas.")] = "1,32",
    requests_per_stream: Annotated[int, typer.Option()] = 8,
    input_len: Annotated[int, typer.Option()] = 64,
    output_len: Annotated[int, typer.Option()] = 200,
    json_path: JsonOption = None,
) -> None:
    """Streamed completions from a running cluster, one SSE chunk a token, with CPU time by process."""
    from deploy.bench.cpu_time import CpuTimes
    from deploy.bench.http_load import LoadPlan, run_load
    from deploy.client import Client

    name = model or Client(url).first_model()
    result: dict[str, Any] = {"bench": "http", "environment": environment(), "runs": []}
    # No prompt is sent twice, not by another call either: the cluster's cache would answer it.
    seeds = random.SystemRandom()
    for count in _numbers(streams, "streams"):
        plan = LoadPlan(url, name, count, requests_per_stream, input_len, output_len)
        asyncio.run(run_load(replace(plan, requests_per_stream=1, seed=seeds.getrandbits(32))))  # warm-up
        before = CpuTimes.now()
        found = asyncio.run(run_load(replace(plan, seed=seeds.getrandbits(32))))
        cpu_us = before.per_token_us(CpuTimes.now(), found.num_chunks)
        result["runs"].append({**asdict(found), "cpu_us_per_token": cpu_us})
    show_runs("http", [{k: v for k, v in run.items() if k != "cpu_us_per_token"} for run in result["runs"]])
    show_runs("CPU microseconds a token, by process", [run["cpu_us_per_token"] for run in result["runs"]])
    write_result(json_path, result)


@app.command()
def memory(
    model: ModelOption = None,
    prompt_len: Annotated[int, typer.Option(help="Of the prompt that is found in host memory.")] = 8000,
    swap_space: Annotated[float, typer.Option(help="Host memory, GiB.")] = 8.0,
    load_format: LoadFormatOption = "auto",
    json_path: JsonOption = None,
) -> None:
    """Copies between device and host by block size, and the first token of a prompt found in host memory."""
    import torch

    from deploy.bench.pressure import measure_host_hit
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
        max_model_len=prompt_len + 16,
        max_num_batched_tokens=2048,
    )
    result["host_hit"] = asdict(measure_host_hit(llm, prompt_len))
    show_runs("first token", [result["host_hit"]])
    write_result(json_path, result)
    llm.close()


def _numbers(text: str, param: str) -> list[int]:
    """Whole numbers separated by commas, each at least 1."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        flag = param.replace("_", "-")
        raise InvalidRequest(f"--{flag} is {text!r}: give whole numbers from 1, separated by commas", param)
    return [int(part) for part in parts]
