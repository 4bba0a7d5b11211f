"""``shoal generate``: prompts of the command line or of a file, completed in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from deploy.lines import file_lines, line_value
from deploy.output_file import check_output, is_same_file, open_output
from workers.engine.errors import InvalidRequest

_PROMPT_SUFFIXES = (".txt", ".jsonl", ".json", ".md", ".csv")
"""Of words that hardly are prompts."""


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
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an output.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, max=100, help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="For the same random numbers each time.")] = None,
    tensor_parallel_size: Annotated[int, typer.Option("--tensor-parallel-size", "-tp", help="Ranks.")] = 1,
    max_model_len: Annotated[int | None, typer.Option(help="Most tokens of prompt and output.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    quantization: Annotated[
        str | None, typer.Option(help="fp8, int8 or int4, done at load; or as it is stored, the default.")
    ] = None,
    load_format: Annotated[str, typer.Option(help="auto, gguf, safetensors or dummy.")] = "auto",
) -> None:
    """Complete prompts in this process, without a server."""
    if output is not None:
        check_output(output, "--output")
    prompt_file = _file_of(prompt[0]) if len(prompt) == 1 else None
    if output is not None and prompt_file is not None and is_same_file(output, prompt_file):
        raise InvalidRequest(f"--output {output} would overwrite the prompts in it: name another", "output")
    prompts = list(prompt) if prompt_file is None else read_prompts(prompt_file)
    from shoal import LLM, SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    llm = LLM(
        model,
        tensor_parallel_size=tensor_parallel_size,
        max_model_len=max_model_len,
        dtype=dtype,
        quantization=quantization,
        load_format=load_format,
    )
    shows_bar = len(prompts) > 1
    if is_chat:
        conversations = [[{"role": "user", "content": one}] for one in prompts]
        outputs = llm.chat(conversations, params, use_tqdm=shows_bar)
    else:
        outputs = llm.generate(prompts, params, use_tqdm=shows_bar)
    llm.close()
    if output is None:
        for one in outputs:
            typer.echo(one.outputs[0].text)
        return
    with open_output(output, "--output") as file:
        for text, one in zip(prompts, outputs, strict=True):
            _write(
                file,
                {"prompt": text, "text": one.outputs[0].text, "finish_reason": one.outputs[0].finish_reason},
            )


def _file_of(word: str) -> Path | None:
    """The file of prompts that ``word`` names; None: it is a prompt.

    Raises:
        InvalidRequest: it looks like a file's name, and there is none.
    """
    path = Path(word)
    try:
        if path.is_file():
            return path
        is_folder = path.is_dir()
    except (OSError, ValueError):  # longer than a file's name may be, or with a byte that none has
        return None
    if word.split() == [word] and ("/" in word or path.suffix in _PROMPT_SUFFIXES):
        what = "is a folder" if is_folder else "is no file, though it looks like one"
        raise InvalidRequest(
            f"{word} {what}: name a file of prompts; to complete this text itself, put it into one", "prompt"
        )
    return None


def read_prompts(path: Path) -> list[str]:
    """The prompts in a file; empty lines are passed over.

    Raises:
        InvalidRequest: a line is not what the file's name promises.
    """
    lines = [(number, line) for number, line in enumerate(file_lines(path, "prompt"), 1) if line.strip()]
    if not lines:
        raise InvalidRequest(f"{path} holds no prompts", "prompt")
    is_json = path.suffix == ".jsonl"
    return [_prompt(path, number, line) if is_json else line for number, line in lines]


def _prompt(path: Path, number: int, line: str) -> str:
    try:
        value = line_value(line)
    except ValueError as error:
        raise InvalidRequest(f"{path}, line {number}: {error}", "prompt") from None
    text = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise InvalidRequest(f"{path}, line {number}: neither text nor an object with a prompt", "prompt")
    return text


def _write(file: TextIO, record: dict[str, Any]) -> None:
    file.write(json.dumps(record, ensure_ascii=False) + "\n")
