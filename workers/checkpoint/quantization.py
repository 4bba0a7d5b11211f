"""How a checkpoint's weights are quantized, as its config says. No tensors.

Every format ends as one of three kinds of weight (``workers.model.quantized``): plain numbers, codes with a scale for
each group, or 8-bit numbers with a scale for each row that are multiplied as such.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from workers.engine.errors import UserError

FORMATS = ("awq", "gptq", "squeezellm", "fp8", "int8", "compressed-tensors", "bitsandbytes", "gguf")
"""What ``--quantization`` may name."""
ONLINE = ("fp8", "int8", "int4")
"""What full-precision weights can be quantized to while they are loaded."""
_EVEN_STEPS = ("awq", "gptq", "compressed-tensors")
"""Formats whose codes of 4 bits are multiples of a step, as those of "int4" are."""
INT4_GROUP = 32
"""Weights that share a scale and an offset when quantized to "int4" at load: as in llama.cpp's Q4_1."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """How linear weights are stored."""

    format: str
    """One of ``FORMATS``, or of ``ONLINE`` for weights that are stored in full."""
    is_online: bool = False
    """Stored in full, quantized at load."""
    bits: int = 8
    group_size: int | None = None
    """Weights of a row that share a scale; None: the whole row."""
    has_zeros: bool = False
    """Codes have a zero point for each group; else theirs is the middle of their range."""
    zero_shift: int = 0
    """What stored zero points lack: 1 in GPTQ's first format."""
    kind: str = ""
    """Of formats with several: "float-quantized", "int-quantized", "pack-quantized"; "nf4", "fp4", "int8"; "block"."""
    block: tuple[int, int] = (128, 128)
    """Of kind "block": rows and columns that share a scale."""
    is_narrow: bool = False
    """Asked for: a CPU keeps the checkpoint's codes and multiplies integers, instead of unpacking them at load."""

    @property
    def marker(self) -> str | None:
        """The tensor that a layer has if it is stored so, and else has not; None where names do not tell."""
        if self.is_online or self.format == "gguf":
            return None
        if self.format == "bitsandbytes":
            return "SCB" if self.kind == "int8" else "weight.absmax"
        if self.kind == "pack-quantized":
            return "weight_packed"
        if self.format == "fp8" and self.kind == "block":
            return "weight_scale_inv"
        if self.format in ("fp8", "compressed-tensors"):
            return "weight_scale"
        return "lookup_table" if self.format == "squeezellm" else "qweight"


def quantization_of(config: Mapping[str, object], where: str) -> Quantization | None:
    """Read ``quantization_config`` of a config.json; None where weights are stored in full.

    Raises:
        UserError: a format, or a variant of one, that Shoal does not have.
    """
    raw = config.get("quantization_config") or config.get("compression_config")
    if not raw:
        return None
    if not isinstance(raw, Mapping):
        raise UserError(f"{where}: quantization_config is not an object")
    method = str(raw.get("quant_method", raw.get("quantization_method", "")))
    readers = {
        "awq": _awq,
        "gptq": _gptq,
        "squeezellm": _squeezellm,
        "fp8": _fp8,
        "compressed-tensors": _compressed_tensors,
        "bitsandbytes": _bitsandbytes,
    }
    if method not in readers:
        raise UserError(
            f"{where} is quantized by {method or 'an unnamed method'!r}; Shoal reads {', '.join(FORMATS)}"
        )
    return readers[method](raw, where)


def check_quantized(how: Quantization | None, tensor_names: Iterable[str], where: str) -> None:
    """Return if the tensors are stored as the config says.

    Raises:
        UserError: no layer is: the weights are in full.
    """
    marker = how.marker if how is not None else None
    if how is None or marker is None or any(name.endswith(f".{marker}") for name in tensor_names):
        return
    ways = "take its quantization_config out of config.json to serve it in full"
    if how.format in ONLINE:
        ways += f", and give --quantization {how.format} to have it quantized at load"
    raise UserError(
        f"config.json of {where} says {how.format}, but no layer is stored so (none has {marker}): {ways}",
        "model",
    )


def choose_quantization(stored: Quantization | None, wanted: str | None) -> Quantization | None:
    """Return how to load weights that are ``stored`` so, where a user asked for ``wanted`` (None: as they are).

    Raises:
        UserError: the two contradict each other, or ``wanted`` is unknown.
    """
    if wanted is None or wanted == "auto":
        return stored
    if wanted not in (*FORMATS, *ONLINE):
        raise UserError(
            f"quantization {wanted!r} is unknown; {', '.join(dict.fromkeys((*FORMATS, *ONLINE)))} are",
            "quantization",
        )
    if stored is not None:
        names = {stored.format, *_aliases(stored)}
        if wanted in names:
            return stored
        if stored.format == "gguf" and wanted in ONLINE:
            return _online(wanted)
        if wanted == "int4" and stored.bits <= 4 and stored.format in _EVEN_STEPS:
            return replace(stored, is_narrow=True)
        raise UserError(
            f"quantization {wanted!r} was asked for, but the checkpoint is {stored.format}: leave it out",
            "quantization",
        )
    if wanted not in ONLINE:
        raise UserError(
            f"quantization {wanted!r} was asked for, but the checkpoint is not quantized; "
            f"while loading it can be quantized to {', '.join(ONLINE)}",
            "quantization",
        )
    return _online(wanted)


def _online(wanted: str) -> Quantization:
    """To quantize at load: full weights, or a GGUF file's read back in full."""
    if wanted == "int4":
        return Quantization("int4", is_online=True, bits=4, group_size=INT4_GROUP)
    return Quantization(wanted, is_online=True)


def _aliases(stored: Quantization) -> tuple[str, ...]:
    """Other names that a user may know the format by."""
    return {"float-quantized": ("fp8",), "int-quantized": ("int8",)}.get(stored.kind, ())


def _awq(raw: Mapping[str, object], where: str) -> Quantization:
    bits, group = _number(raw, "bits", 4), _number(raw, "group_size", 128)
    version = str(raw.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise UserError(f"{where} is AWQ of {bits} bits in layout {version!r}; Shoal reads 4 bits in 'gemm'")
    return Quantization("awq", bits=4, group_size=_group(group), has_zeros=bool(raw.get("zero_point", True)))


def _gptq(raw: Mapping[str, object], where: str) -> Quantization:
    bits = _number(raw, "bits", 4)
    if bits not in (2, 3, 4, 8):
        raise UserError(f"{where} is GPTQ of {bits} bits; 2, 3, 4 and 8 are supported")
    if raw.get("dynamic"):
        raise UserError(
            f"{where} is GPTQ of several kinds ('dynamic'): layers of one kind, or in full, are read", "model"
        )
    version = str(raw.get("checkpoint_format", "gptq"))
    if version not in ("gptq", "gptq_v2"):
        raise UserError(f"{where}: GPTQ layout {version!r} is not supported; gptq and gptq_v2 are")
    return Quantization(
        "gptq",
        bits=bits,
        group_size=_group(_number(raw, "group_size", 128)),
        has_zeros=True,
        zero_shift=int(version == "gptq"),
    )


def _squeezellm(raw: Mapping[str, object], where: str) -> Quantization:
    bits = _number(raw, "wbits", _number(raw, "bits", 4))
    if bits not in (3, 4):
        raise UserError(f"{where} is SqueezeLLM of {bits} bits; 3 and 4 are supported")
    return Quantization("squeezellm", bits=bits)


def _fp8(raw: Mapping[str, object], where: str) -> Quantization:
    if raw.get("weight_block_size") is None:
        return Quantization("fp8")
    return Quantization("fp8", kind="block", block=_block(raw, "weight_block_size", where))


def _compressed_tensors(raw: Mapping[str, object], where: str) -> Quantization:
    groups = raw.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise UserError(f"{where}: one group of compressed tensors is supported, this has {groups!r}")
    sparse = raw.get("sparsity_config")
    if isinstance(sparse, Mapping) and sparse.get("format", "dense") != "dense":
        raise UserError(f"{where}: sparse weights ({sparse['format']}) are not read; dense ones are", "model")
    (group,) = groups.values()
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(group, Mapping) or not isinstance(weights, Mapping):
        raise UserError(
            f"{where}: config_groups of compressed tensors do not say how weights are stored", "model"
        )
    kind = str(group.get("format") or raw.get("format", ""))
    kind = {"naive-quantized": "int-quantized" if weights.get("type") == "int" else "float-quantized"}.get(
        kind, kind
    )
    strategy = weights.get("strategy")
    bits = _number(weights, "num_bits", 8)
    if kind in ("float-quantized", "int-quantized") and bits == 8 and strategy in ("tensor", "channel"):
        return Quantization("compressed-tensors", kind=kind)
    if kind == "float-quantized" and bits == 8 and strategy == "block":
        return Quantization(
            "compressed-tensors", kind="block", block=_block(weights, "block_structure", where)
        )
    if kind == "pack-quantized" and bits in (4, 8) and strategy in ("group", "channel"):
        return Quantization(
            "compressed-tensors",
            kind=kind,
            bits=bits,
            group_size=_group(_number(weights, "group_size", -1)),
            has_zeros=not weights.get("symmetric", True),
        )
    raise UserError(
        f"{where}: compressed tensors of format {kind!r}, {bits} bits by {strategy} are not supported; "
        "float-quantized of 8 bits by tensor, channel or block, int-quantized of 8 bits by tensor or channel, "
        "pack-quantized of 4 or 8 bits are"
    )


def _bitsandbytes(raw: Mapping[str, object], where: str) -> Quantization:
    if raw.get("load_in_8bit") or raw.get("_load_in_8bit"):
        return Quantization("bitsandbytes", kind="int8")
    kind = str(raw.get("bnb_4bit_quant_type", "nf4"))
    if kind not in ("nf4", "fp4"):
        raise UserError(f"{where}: bitsandbytes type {kind!r} is not supported; nf4, fp4 and int8 are")
    return Quantization("bitsandbytes", bits=4, kind=kind)


def _group(size: int) -> int | None:
    if size != -1 and size < 1:
        raise UserError(
            f"quantization_config has group_size = {size}, it must be a number of weights, or -1 for whole rows",
            "model",
        )
    return None if size == -1 else size


def _block(raw: Mapping[str, object], key: str, where: str) -> tuple[int, int]:
    """Rows and columns."""
    sizes = raw.get(key)
    if (
        not isinstance(sizes, list)
        or len(sizes) != 2
        or not all(type(one) is int and one > 0 for one in sizes)
    ):
        raise UserError(f"{where}: quantization_config has {key} = {sizes!r}, two sizes are needed", "model")
    return sizes[0], sizes[1]


def _number(raw: Mapping[str, object], key: str, default: int) -> int:
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"quantization_config has {key} = {value!r}, an integer is needed")
    return value
