"""``shoal generate``: prompts of the command line or of a file, completed in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from deploy.output_file import open_output
from workers.engine.errors import InvalidRequest


def generate(
    prompt: Annotated[
        list[str],
        typer.Argument(
            help='Prompts; or one file of them: .jsonl with {"prompt": ...} or strings, else a line each.'
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write one JSON object a prompt here.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A folder, a .gguf file or a hub id. (default: the demo model)")
    ] = None,
    is_chat: Annotated[bool, typer.Option("--chat", help="Use the chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an output.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="For the same random numbers each time.")] = None,
    tensor_parallel_size: Annotated[int, typer.Option("--tensor-parallel-size", "-tp", help="Ranks.")] = 1,
    max_model_len: Annotated[int | None, typer.Option(help="Most tokens of prompt and output.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    quantization: Annotated[str | None, typer.Option(help="fp8, int8 or int4. (default: as stored)")] = None,
    load_format: Annotated[str, typer.Option(help="auto, gguf, safetensors or dummy.")] = "auto",
) -> None:
    """Complete prompts in this process, without a server."""
    if output is not None:
        _check_output(output)
    prompts = _read_prompts(Path(prompt[0])) if len(prompt) == 1 and _is_file(prompt[0]) else list(prompt)
    from shoal import LLM, SamplingParams

    file = open_output(output, "--output") if output is not None else None  # before hours of work, not after
    llm = LLM(
        model,
        tensor_parallel_size=tensor_parallel_size,
        max_model_len=max_model_len,
        dtype=dtype,
        quantization=quantization,
        load_format=load_format,
    )
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    shows_bar = len(prompts) > 1
    if is_chat:
        conversations = [[{"role": "user", "content": one}] for one in prompts]
        outputs = llm.chat(conversations, params, use_tqdm=shows_bar)
    else:
        outputs = llm.generate(prompts, params, use_tqdm=shows_bar)
    llm.close()
    if file is None:
        for one in outputs:
            typer.echo(one.outputs[0].text)
        return
    with file:
        for text, one in zip(prompts, outputs, strict=True):
            _write(
                file,
                {"prompt": text, "text": one.outputs[0].text, "finish_reason": one.outputs[0].finish_reason},
            )


def _check_output(path: Path) -> None:
    """What cannot be written is said before anything is computed."""
    try:
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        raise InvalidRequest(f"--output {path} cannot be written: {error.strerror}", "output") from None


def _is_file(word: str) -> bool:
    try:
        return Path(word).is_file()
    except OSError:  # a prompt longer than a file's name may be
        return False


def _read_prompts(path: Path) -> list[str]:
    """The prompts in a file; empty lines are passed over.

    Raises:
        InvalidRequest: a line is not what the file's name promises.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}", "prompt") from None
    if not lines:
        raise InvalidRequest(f"{path} holds no prompts", "prompt")
    return [_prompt(path, i, line) for i, line in enumerate(lines, 1)] if path.suffix == ".jsonl" else lines


def _prompt(path: Path, number: int, line: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"{path}, line {number}: no JSON: {error}", "prompt") from None
    text = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise InvalidRequest(f"{path}, line {number}: neither text nor an object with a prompt", "prompt")
    return text


def _write(file: TextIO, record: dict[str, Any]) -> None:
    file.write(json.dumps(record, ensure_ascii=False) + "\n")
