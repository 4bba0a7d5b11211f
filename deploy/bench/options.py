"""Options that several measuring commands have; whatever can be told to be wrong is, before anything is measured."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from deploy.output_file import check_output
from workers.engine.errors import InvalidRequest

MOST_TIMES = 1_000_000
"""How much more often than usual anything may be asked to happen; beyond, figures are no numbers any more."""


def checked_output(param: typer.CallbackParam, value: Path | None) -> Path | None:
    """An option's callback: ``value``, which can be written.

    Raises:
        InvalidRequest: it cannot.
    """
    if value is not None:
        check_output(value, param.opts[0])
    return value


def finite(param: typer.CallbackParam, value: float | None) -> float | None:
    """An option's callback: ``value``, which is a number; bounds alone let NaN pass.

    Raises:
        InvalidRequest: it is infinite or none.
    """
    if value is not None and not math.isfinite(value):
        raise InvalidRequest(f"{param.opts[0]} is {value}, it must be a finite number", param.name)
    return value


def above_zero(param: typer.CallbackParam, value: float | None) -> float | None:
    """An option's callback: ``value``, which is a number above 0.

    Raises:
        InvalidRequest: it is none.
    """
    if value is not None and not 0 < value < math.inf:
        raise InvalidRequest(f"{param.opts[0]} is {value:g}, it must be a number above 0", param.name)
    return value


def above_one(param: typer.CallbackParam, value: float | None) -> float | None:
    """An option's callback: ``value``, which is a number above 1.

    Raises:
        InvalidRequest: it is none.
    """
    if value is not None and not 1 < value < math.inf:
        raise InvalidRequest(f"{param.opts[0]} is {value:g}, it must be a number above 1", param.name)
    return value


JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Write the result here.", callback=checked_output)
]
ModelOption = Annotated[
    str | None, typer.Option(help="A folder, a .gguf file or a hub id. (default: the demo model)")
]
MaxNumSeqsOption = Annotated[int, typer.Option(min=1, max=4096, help="Most requests in a step.")]
MaxModelLenOption = Annotated[int | None, typer.Option(min=2, help="Most tokens of prompt and output.")]
MaxTokensOption = Annotated[
    int | None, typer.Option("--max-num-batched-tokens", min=16, help="Most tokens in a step.")
]
QuantizationOption = Annotated[str | None, typer.Option(help="Quantize full weights at load.")]
DtypeOption = Annotated[str, typer.Option()]
LoadFormatOption = Annotated[str, typer.Option(help="auto, gguf, safetensors, or dummy for random weights.")]
RepeatsOption = Annotated[int, typer.Option(min=1, help="Runs of each; the best counts.")]


MOST_PROMPTS = 1_000_000
"""At once: all of them are in memory before the first is answered."""


def whole_numbers(text: str, flag: str, most: int = MOST_PROMPTS) -> list[int]:
    """Whole numbers separated by commas, each at least 1 and at most ``most``.

    Raises:
        InvalidRequest: ``text`` has something else.
    """
    parts = [part.strip() for part in text.split(",")]
    # Python reads numbers of thousands of digits no more.
    if not all(part.isdecimal() and len(part) <= len(str(most)) and 1 <= int(part) <= most for part in parts):
        raise InvalidRequest(
            f"{flag} is {text!r}: give whole numbers from 1 to {most}, separated by commas", flag
        )
    return [int(part) for part in parts]


def check_batches(sizes: list[int], flag: str, max_num_seqs: int) -> None:
    """Return if a step takes batches of these sizes whole; of a larger one, other steps would be timed.

    Raises:
        InvalidRequest: it does not.
    """
    if max(sizes) > max_num_seqs:
        raise InvalidRequest(
            f"{flag} has {max(sizes)}, a step takes --max-num-seqs {max_num_seqs} requests: lower it, or raise that",
            flag,
        )


def check_spread(spread: int, **lengths: int) -> None:
    """Return if lengths that are ``spread`` less have a token left.

    Args:
        lengths: by the names of their options.

    Raises:
        InvalidRequest: one has none.
    """
    for name, length in lengths.items():
        if spread >= length:
            flag = "--" + name.replace("_", "-")
            raise InvalidRequest(f"--spread is {spread}, it must be less than {flag} {length}", "spread")


def check_order(low_flag: str, low: float, high_flag: str, high: float, is_equal_fine: bool = False) -> None:
    """Return if ``low`` is below ``high``, or equal to it where that is fine.

    Raises:
        InvalidRequest: it is not.
    """
    if not (low < high or (is_equal_fine and low == high)):
        limit = "at least" if is_equal_fine else "above"
        raise InvalidRequest(f"{high_flag} is {high:g}, it must be {limit} {low_flag} {low:g}", high_flag)


def check_not_given(context: typer.Context, names: tuple[str, ...], why: str) -> None:
    """Return if none of these options was given, though it be with its default.

    Args:
        why: such an option says nothing here.

    Raises:
        InvalidRequest: one was; the message has its value.
    """
    for param in context.command.params:
        source = context.get_parameter_source(param.name or "")
        if param.name in names and source is not None and source.name != "DEFAULT":
            value = context.params[param.name]
            shown = next((opt for opt in param.secondary_opts if value is False), f"{param.opts[0]} {value}")
            raise InvalidRequest(f"{shown} has no effect {why}", param.name)


def check_context(model: str | None, max_model_len: int | None, num_tokens: int, flags: str) -> int:
    """Return the most tokens of a request, if so many fit; reads the model's config, no weights.

    Args:
        flags: where the tokens come from, for the message.

    Raises:
        UserError: they do not, or there is no such model.
    """
    from deploy.model_check import check_length
    from deploy.settings import make_settings
    from workers.checkpoint.model_config import read_model_config
    from workers.checkpoint.source import resolve_model

    settings = make_settings(model=model, max_model_len=max_model_len)
    files = resolve_model(settings.model, settings.source)
    config = read_model_config(files, settings.model_impl)
    check_length(settings, files, config)
    longest = settings.max_model_len or config.max_position_embeddings
    if num_tokens > longest:
        source = files.name if settings.max_model_len is None else "--max-model-len"
        raise InvalidRequest(
            f"{flags}: requests of {num_tokens} tokens, {source} allows {longest} at most", "input_len"
        )
    return longest


def check_gpus(needed: int = 1, flag: str = "") -> None:
    """Return if this machine shows so many GPUs.

    Args:
        flag: what asks for them, with its value.

    Raises:
        InvalidRequest: it does not.
    """
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found == 0:
        raise InvalidRequest(
            "this measures GPUs and this machine shows no CUDA device: run it on one that does"
        )
    if found < needed:
        raise InvalidRequest(f"{flag} needs {needed} GPUs, this machine shows {found}: lower it", flag)
