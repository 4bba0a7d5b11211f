"""The command ``shoal``."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from deploy.bench.cli import app as bench
from deploy.console import console, print_error
from deploy.deploy_command import deploy
from deploy.fetch_command import fetch
from deploy.simulate.cli import simulate
from deploy.simulate.trace_cli import app as trace
from workers.engine.errors import ShoalError

app = typer.Typer(
    name="shoal",
    help="Serve large language models on a Ray cluster; try one on this machine with `shoal serve`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")
app.command()(simulate)
app.add_typer(trace, name="trace")
app.command()(deploy)
app.command()(fetch)

ModelArgument = Annotated[
    str | None,
    typer.Argument(help="A folder, a .gguf file or a hub id; none: the demo model, SmolLM2-135M."),
]


@app.command()
def serve(
    model: ModelArgument = None,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    host: Annotated[str | None, typer.Option(help="Interface of every socket. (default: 127.0.0.1)")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the OpenAI API. (default: 8000)")] = None,
    replicas: Annotated[
        int | None, typer.Option(help="Copies of the model, each with its own engine. (default: 2)")
    ] = None,
    tensor_parallel_size: Annotated[
        int | None,
        typer.Option(
            "--tensor-parallel-size", "-tp", help="Ranks that share one replica's model. (default: 1)"
        ),
    ] = None,
    ingress_replicas: Annotated[int | None, typer.Option(help="HTTP processes. (default: 1)")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Most tokens of prompt and output.")] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Most requests in a step. (CPU 64, GPU 256)")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Most tokens in a step. (CPU 1024, GPU 16384)")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens of a KV block: 16, 32 or 64. (default: 16)")
    ] = None,
    enable_prefix_caching: Annotated[
        bool | None, typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="(default: on)")
    ] = None,
    num_gpu_blocks_override: Annotated[int | None, typer.Option(help="KV blocks of a rank.")] = None,
    kv_cache_gib: Annotated[float | None, typer.Option(help="KV memory of a rank on a CPU, GiB.")] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Share of GPU memory to use. (default: 0.9)")
    ] = None,
    load_format: Annotated[
        str | None, typer.Option(help="auto, gguf, safetensors or dummy. (default: auto)")
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(help="Quantize full weights at load: fp8, int8 or int4. (default: as stored)"),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="auto, float32, bfloat16 or float16. (default: auto)")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda. (default: auto)")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of dummy weights. (default: 0)")] = None,
    cpu_threads: Annotated[
        int | None, typer.Option(help="Threads of a rank on a CPU. (default: its share)")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="How requests are placed: prefix (default), least-load, ..."),
    ] = None,
    stall_timeout_s: Annotated[
        float | None, typer.Option(help="Without a step while work waits. (default: 60)")
    ] = None,
    drain_timeout_s: Annotated[
        float | None, typer.Option(help="For requests of a replica that leaves. (default: 60)")
    ] = None,
    replica_wait_s: Annotated[
        float | None, typer.Option(help="A request waits for a replica where none is there. (default: 120)")
    ] = None,
    haproxy: Annotated[
        bool | None,
        typer.Option("--haproxy/--no-haproxy", help="HAProxy before the ingress. (default: on, on Linux)"),
    ] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Where the demo model is kept.")] = None,
    offline: Annotated[
        bool | None, typer.Option("--offline", help="Never ask a network for a model.")
    ] = None,
    record_trace: Annotated[
        Path | None,
        typer.Option(help="A folder to record arrivals, lengths and block hashes in, for `shoal simulate`."),
    ] = None,
    scripted: Annotated[
        bool | None, typer.Option("--scripted", hidden=True, help="Tokens by formula instead of a model.")
    ] = None,
    scripted_step_s: Annotated[float | None, typer.Option(hidden=True)] = None,
) -> None:
    """Start a cluster on this machine and serve MODEL with the OpenAI API until Ctrl-C."""
    given = dict(locals())
    from deploy.local_cluster import start_local_cluster
    from deploy.settings import make_settings

    settings = make_settings(**given)

    stopped = threading.Event()
    _stop_on_signals(stopped)
    cluster = None
    try:
        cluster = start_local_cluster(settings)
        _print_ready(cluster.url, cluster.model_name)
        stopped.wait()
    except _Interrupted:
        pass
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave half of it behind
        if cluster is not None:
            console.print("Stopping …")
            cluster.stop()
            console.print("Stopped; no process is left.")
    if cluster is None:
        raise typer.Exit(130)  # as shells report an interrupted command


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="The endpoint.")] = "http://127.0.0.1:8000/v1",
    model: Annotated[str | None, typer.Option(help="Which model. (default: the first served)")] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.7,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="If the endpoint wants one.")
    ] = None,
) -> None:
    """Talk with a served model in the terminal."""
    from deploy.chat import Chat
    from deploy.client import Client

    client = Client(url, api_key)
    Chat(client, model or client.first_model(), system, max_tokens, temperature).run()


@app.command()
def generate(
    prompt: Annotated[list[str], typer.Argument(help="One or more prompts.")],
    model: Annotated[
        str | None, typer.Option(help="A folder, a .gguf file or a hub id. (default: the demo model)")
    ] = None,
    is_chat: Annotated[bool, typer.Option("--chat", help="Use the chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an output.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="For the same random numbers each time.")] = None,
    tensor_parallel_size: Annotated[int, typer.Option("--tensor-parallel-size", "-tp")] = 1,
    max_model_len: Annotated[int | None, typer.Option()] = None,
    dtype: Annotated[str, typer.Option()] = "auto",
    quantization: Annotated[str | None, typer.Option(help="fp8, int8 or int4.")] = None,
    load_format: Annotated[str, typer.Option()] = "auto",
) -> None:
    """Complete prompts in this process, without a server."""
    from shoal import LLM, SamplingParams

    llm = LLM(
        model,
        tensor_parallel_size=tensor_parallel_size,
        max_model_len=max_model_len,
        dtype=dtype,
        quantization=quantization,
        load_format=load_format,
    )
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    if is_chat:
        outputs = llm.chat([[{"role": "user", "content": one}] for one in prompt], params, use_tqdm=False)
    else:
        outputs = llm.generate(list(prompt), params, use_tqdm=False)
    for output in outputs:
        typer.echo(output.outputs[0].text)
    llm.close()


class _Interrupted(BaseException):
    """Ctrl-C or SIGTERM; no Exception, so that nothing on the way takes it for a failure."""


def _stop_on_signals(stopped: threading.Event) -> None:
    def on_signal(number: int, frame: object) -> None:
        if stopped.is_set():
            return
        stopped.set()
        raise _Interrupted

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)


def _print_ready(url: str, model: str) -> None:
    console.print(f"\n[bold]Shoal answers at {url}/v1[/bold]  (model {escape(model)}; Ctrl-C stops it)\n")
    console.print("Try it:", style="dim")
    console.print(
        escape(
            f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
            f'    -d \'{{"model": "{model}", "max_tokens": 64, '
            '"messages": [{"role": "user", "content": "What is gravity?"}]}\''
        ),
        soft_wrap=True,
    )
    console.print(f"  {sys.argv[0]} chat --url {url}/v1\n", soft_wrap=True)


def main() -> None:
    """Run the command line; errors meant for people become one line and exit code 1."""
    try:
        app()
    except ShoalError as error:
        print_error(str(error))
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
