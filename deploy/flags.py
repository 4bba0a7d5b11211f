"""The flags of ``shoal serve``, made from the fields of ``ServeSettings``: names, help and groups.

Other commands that start an engine have those of them that concern it.

What a flag may hold is checked by the settings alone, so that flags, file and environment fail alike.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from pydantic.fields import FieldInfo

from deploy.model_spec import ENGINE_SETTINGS
from deploy.setting_values import Words
from deploy.settings import ServeSettings

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Model": (
        "served_model_name", "tokenizer", "revision", "download_dir", "load_format", "dtype", "quantization",
        "model_impl", "trust_remote_code", "max_model_len", "seed", "cache_dir", "hub_endpoint", "offline",
    ),
    "Conversations": ("chat_template", "tool_call_parser", "enable_auto_tool_choice", "reasoning_parser"),
    "Endpoint": (
        "host", "port", "grpc_port", "api_key", "api_keys", "ssl_keyfile", "ssl_certfile", "allowed_origins",
        "max_logprobs", "max_body_bytes", "haproxy", "ingress_replicas",
    ),
    "Replicas": (
        "replicas", "max_replicas", "min_replicas", "target_ttft_s", "target_tpot_s", "downscale_delay_s",
        "scale_to_zero_delay_s", "tensor_parallel_size", "device", "cpu_threads", "policy", "replica_wait_s",
        "stall_timeout_s", "rank_timeout_s", "drain_timeout_s", "record_trace",
    ),
    "Engine": (
        "scheduling_policy", "max_num_seqs", "max_num_batched_tokens", "max_step_growth", "enforce_eager",
        "deterministic", "enable_chunked_prefill", "num_scheduler_steps",
    ),
    "Memory": (
        "gpu_memory_utilization", "kv_cache_gib", "num_gpu_blocks_override", "block_size", "kv_cache_dtype",
        "enable_prefix_caching", "swap_space", "preemption_mode", "kv_host_fraction", "kv_checksum", "copy_gib_per_s",
    ),
    "Observability": ("metrics_port", "vllm_metric_names", "log_format", "otlp_endpoint", "trace_ratio"),
}  # fmt: skip
"""Panels of ``--help``; a field that stands in none is shown under "Further"."""

_SHORT = {"tensor_parallel_size": "-tp"}
_HIDDEN = ("scripted", "scripted_step_s", "copy_gib_per_s")

Serve = Callable[[dict[str, object]], None]


def with_flags(serve: Serve) -> Callable[..., None]:
    """A command that collects what was given on the command line and hands it to ``serve``, by setting's name."""

    def command(**given: Any) -> None:
        serve(_given(given))

    parameters = [
        _parameter("model", Annotated[str | None, typer.Argument(help=_help("model"), metavar="MODEL")])
    ]
    parameters.append(
        _parameter(
            "config",
            Annotated[
                Path | None,
                typer.Option(
                    help="YAML file of settings, keys as flags without the dashes; flags go before it."
                ),
            ],
        )
    )
    for name in _in_order():
        parameters.append(_parameter(name, _option(name)))
    return _described(command, parameters, serve.__doc__)


def with_engine_flags(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with the flags that concern an engine beside its own parameters.

    What was given of them it takes as ``engine``, by setting's name.
    """

    def whole(**given: Any) -> None:
        engine = {name: given.pop(name) for name in names}
        command(**given, engine=_given(engine))

    names = [name for name in _in_order() if name in ENGINE_SETTINGS or name == "device"]
    hints = get_type_hints(command, include_extras=True)
    parameters = [
        one.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[one.name])
        for one in inspect.signature(command).parameters.values()
        if one.name != "engine"
    ]
    parameters += [_parameter(name, _option(name)) for name in names]
    return _described(whole, parameters, command.__doc__)


def _given(flags: Mapping[str, Any]) -> dict[str, object]:
    """What was given of some flags."""
    # Joined, since a word means by flag what it means in a variable: several, where commas are in it.
    words = {name: ",".join(value) for name, value in flags.items() if isinstance(value, list) and value}
    return {name: value for name, value in flags.items() if value not in (None, [])} | words


def _described(
    command: Callable[..., None], parameters: list[inspect.Parameter], doc: str | None
) -> Callable[..., None]:
    """``command``, whose parameters and help the parser is told."""
    command.__doc__ = doc
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _in_order() -> list[str]:
    grouped = [name for names in GROUPS.values() for name in names]
    rest = [name for name in ServeSettings.model_fields if name not in grouped and name != "model"]
    return [*grouped, *rest]


def _option(name: str) -> Any:
    """The annotation of one flag. All but switches are words to the parser: settings say what they may be."""
    flag = "--" + name.replace("_", "-")
    panel = next((panel for panel, names in GROUPS.items() if name in names), "Further")
    field = ServeSettings.model_fields[name]
    hidden = name in _HIDDEN
    if field.annotation is bool:
        option = typer.Option(
            f"{flag}/--no-{flag[2:]}", help=_help(name), rich_help_panel=panel, hidden=hidden
        )
        return Annotated[bool | None, option]
    names = [flag, _SHORT[name]] if name in _SHORT else [flag]
    option = typer.Option(
        *names, help=_help(name), rich_help_panel=panel, hidden=hidden, metavar=_metavar(field)
    )
    return Annotated[list[str] | None if _is_words(field) else str | None, option]


def _help(name: str) -> str:
    """What stands under the field, and its default where that is not said by "None: ..."."""
    field = ServeSettings.model_fields[name]
    text = (
        " ".join((field.description or "").split())
        .replace("; None:", ". Default:")
        .replace("None:", "Default:")
    )
    default = field.default
    if default in (None, ()):
        return text
    shown = {True: "on", False: "off"}.get(default) if isinstance(default, bool) else None
    shown = shown or (",".join(default) if isinstance(default, tuple) else str(default))
    return f"{text} Default: {shown}."


def _is_words(field: FieldInfo) -> bool:
    return field.annotation == typing.get_args(Words)[0]


def _metavar(field: FieldInfo) -> str:
    """What to write behind the flag: the choices, or the kind of value."""
    kinds = [field.annotation]
    if typing.get_origin(field.annotation) in (types.UnionType, typing.Union):
        kinds = [kind for kind in typing.get_args(field.annotation) if kind is not types.NoneType]
    if typing.get_origin(kinds[0]) is typing.Literal:
        return "|".join(str(choice) for choice in typing.get_args(kinds[0]))
    if _is_words(field):
        return "TEXT"
    return {int: "N", float: "NUMBER", Path: "PATH"}.get(kinds[0], "TEXT")  # type: ignore[arg-type]
