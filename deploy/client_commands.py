"""Commands that speak with an endpoint: ``shoal chat``, ``shoal complete``, ``shoal run-batch``."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.console import console, read_line
from deploy.refusals import flag_of
from workers.engine.errors import InvalidRequest

if TYPE_CHECKING:
    from deploy.batch import BatchSummary

Url = Annotated[str, typer.Option(help="The endpoint.")]
Model = Annotated[str | None, typer.Option(help="Which model. (default: the first served)")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")]
Temperature = Annotated[
    float,
    typer.Option(min=0, max=2, help="0 is greedy, 2 the most that OpenAI's API takes."),
]
ApiKey = Annotated[
    str | None, typer.Option(envvar="OPENAI_API_KEY", help="If the endpoint wants one.", show_default=False)
]
_URL = "http://127.0.0.1:8000/v1"


def chat(
    url: Url = _URL,
    model: Model = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    api_key: ApiKey = None,
) -> None:
    """Talk with a served model in the terminal."""
    from deploy.chat import Chat
    from deploy.client import Client

    client = Client(url, api_key)
    Chat(client, model or client.first_model(), system, max_tokens, temperature).run()


def complete(
    prompt: Annotated[
        str | None, typer.Argument(help="The text to go on with; none: read it line by line.")
    ] = None,
    url: Url = _URL,
    model: Model = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.7,
    api_key: ApiKey = None,
) -> None:
    """Let a served model go on with a text, without a chat template."""
    from deploy.client import Client

    client = Client(url, api_key)
    name = model or client.first_model()
    for text in [prompt] if prompt is not None else _lines():
        for piece in client.stream_completion(name, text, max_tokens=max_tokens, temperature=temperature):
            typer.echo(piece, nl=False)
        typer.echo()


def run_batch(
    input_file: Annotated[Path, typer.Option("--input-file", "-i", help="Requests, OpenAI's batch format.")],
    output_file: Annotated[Path, typer.Option("--output-file", "-o", help="Where answers are written.")],
    url: Url = _URL,
    model: Annotated[
        str | None, typer.Option(help="Serve this model for the batch, instead of asking --url.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Requests under way at once.")] = 64,
    api_key: ApiKey = None,
    *,
    engine: dict[str, object],
) -> None:
    """Answer a file of requests: one JSON object a line in, one a line out, in the order they end.

    Answers are written to OUTPUT-FILE.partial, which takes the name when all are there: what was in the file before
    stays until then, and a run that is broken off leaves what it has. A pipe, a device, and a file in a folder that
    takes no other are written line by line as they are. With --model, flags say how that model is run.
    """
    from deploy.batch import read_batch, run
    from deploy.client import Client
    from deploy.output_file import check_output, is_same_file, partial_of

    if engine and model is None:
        flag = flag_of(min(engine))
        raise InvalidRequest(
            f"{flag} needs --model: how the model at --url is run was said where it was started", min(engine)
        )
    requests = read_batch(input_file)
    for written in (output_file, partial_of(output_file)):
        if is_same_file(written, input_file):
            raise InvalidRequest(
                f"--output-file {output_file} would overwrite the input, {written}: name another",
                "output_file",
            )
    check_output(output_file, "--output-file")
    if model is None:
        Client(url, api_key).first_model()  # where nobody answers, no request of the batch would be
        summary = asyncio.run(run(requests, output_file, url, api_key, concurrency))
    else:
        summary = _served(
            model, engine, lambda own: asyncio.run(run(requests, output_file, own, None, concurrency))
        )
    console.print(f"{summary.num_answered} answered, {summary.num_failed} failed: {output_file}")
    if summary.num_failed:
        raise typer.Exit(1)


def _served(model: str, engine: dict[str, object], use: Callable[[str], BatchSummary]) -> BatchSummary:
    """Run ``use`` on an endpoint of a cluster that is started for it and stopped after it."""
    from deploy.local_cluster import start_local_cluster
    from deploy.own_cluster import own_cluster
    from deploy.ports import choose_ports
    from deploy.settings import make_settings

    with own_cluster():
        chosen = choose_ports(1, 8100)
        settings = make_settings(model=model, port=chosen.ports[0], replicas=1, **engine)
        # Nobody else is to reach it, so what variables ask of callers of a server is left out.
        own = dict.fromkeys(("api_keys", "ssl_keyfile", "ssl_certfile")) | {
            "host": "127.0.0.1",
            "api_key": (),
        }
        cluster = start_local_cluster(settings.model_copy(update=own))
        try:
            return use(f"{cluster.url}/v1")
        finally:
            cluster.stop()
            chosen.release()


def _lines() -> Iterator[str]:
    """What is typed or piped in, line by line."""
    prompt = "[bold cyan]text ›[/bold cyan] " if sys.stdin.isatty() else ""
    while (line := read_line(console, prompt)) is not None:
        if line.strip():
            yield line
