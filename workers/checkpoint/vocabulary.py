"""Vocabularies: the bytes of each token, read from a GGUF file or from a Hugging Face folder.

GGUF names its pre-tokenizer instead of describing it; ``_PRE_TOKENIZERS`` translates the names as llama.cpp
does (`src/llama-vocab.cpp`), so that ids are equal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from workers.checkpoint.gguf_file import GgufFile
from workers.checkpoint.source import ModelFiles
from workers.engine.errors import UnknownModel
from workers.library_failure import is_failure

# Values of `tokenizer.ggml.token_type` (llama.cpp, `llama_token_type`).
_CONTROL = 3
_USER_DEFINED = 4

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a model's files say about its text."""

    pipeline_json: str
    """A tokenizer of the ``tokenizers`` library, as JSON."""
    token_bytes: Sequence[bytes]
    """By token id."""
    special_token_ids: frozenset[int]
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """By role: ``bos_token``, ``eos_token``, ..."""
    chat_template: str | None = None
    bos_to_add: int | None = None
    """Put before a prompt that is text, where the pipeline does not do it itself."""


def load_vocabulary(files: ModelFiles) -> Vocabulary:
    """Read a model's vocabulary. Blocks for seconds: not for an event loop.

    Raises:
        UserError: the files hold no tokenizer that is understood; the message says what to do.
    """
    return _from_gguf(files.path) if files.is_gguf else _from_folder(files.path)


def _from_gguf(path: Path) -> Vocabulary:
    metadata = GgufFile(path).metadata

    def value(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.{key}", default)

    kind = value("ggml.model")
    if kind != "gpt2":
        raise UnknownModel(
            f"{path.name}: tokenizer kind {kind!r} is not read from GGUF (only 'gpt2'): "
            "serve the model from a Hugging Face folder",
            "model",
        )
    tokens: list[str] = value("ggml.tokens")
    types: list[int] = value("ggml.token_type", [1] * len(tokens))
    control = [i for i, kind in enumerate(types) if kind == _CONTROL]
    added = [i for i, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED)]
    pipeline = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ", 1)) for merge in value("ggml.merges", [])],
            ignore_merges=value("ggml.pre") == "llama-bpe",
        )
    )
    pipeline.pre_tokenizer = _pre_tokenizer(path, value("ggml.pre", "default"))
    pipeline.decoder = decoders.ByteLevel()
    pipeline.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in control])
    pipeline.add_tokens([AddedToken(tokens[i], normalized=False) for i in added if types[i] == _USER_DEFINED])
    ids = {
        role: value(f"ggml.{key}_token_id")
        for role, key in zip(_ROLES, ("bos", "eos", "unknown", "padding"), strict=True)
    }
    return Vocabulary(
        pipeline_json=pipeline.to_str(),
        token_bytes=byte_level_bytes(tokens, added),
        special_token_ids=frozenset(control),
        special_tokens={role: tokens[i] for role, i in ids.items() if i is not None},
        chat_template=value("chat_template"),
        bos_to_add=ids["bos_token"] if value("ggml.add_bos_token", False) else None,
    )


def _from_folder(path: Path) -> Vocabulary:
    try:
        pipeline_json = (path / "tokenizer.json").read_text(encoding="utf-8")
        spec: dict[str, Any] = json.loads(pipeline_json)
        pipeline = Tokenizer.from_str(pipeline_json)
    except (OSError, ValueError) as error:
        raise UnknownModel(f"{path}: tokenizer.json cannot be read: {error}", "model") from error
    except BaseException as error:  # `tokenizers` raises bare Exception for a bad pipeline, or panics
        if not is_failure(error):
            raise
        raise UnknownModel(f"{path}: tokenizer.json is not understood: {error}", "model") from error
    config = _read_json(path / "tokenizer_config.json")
    spellings: dict[str, int] = pipeline.get_vocab(with_added_tokens=True)
    tokens = [""] * (max(spellings.values(), default=-1) + 1)
    for token, token_id in spellings.items():
        tokens[token_id] = token
    added: list[Mapping[str, Any]] = spec.get("added_tokens", [])
    to_bytes = byte_level_bytes if "ByteLevel" in _decoder_kinds(spec.get("decoder")) else sentencepiece_bytes
    return Vocabulary(
        pipeline_json=pipeline_json,
        token_bytes=to_bytes(tokens, [a["id"] for a in added]),
        special_token_ids=frozenset(a["id"] for a in added if a.get("special")),
        special_tokens={role: spelled for role in _ROLES if (spelled := _spelling(config.get(role)))},
        chat_template=_folder_template(path, config),
    )


def _folder_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """The template file of newer folders, else the config's own; of several named ones, "default"."""
    beside = path / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    template = config.get("chat_template") or _read_json(path / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    return template


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnknownModel(f"{path} is not JSON: {error}", "model") from error
    return found if isinstance(found, dict) else {}


def _spelling(token: Any) -> str | None:
    """A special token of tokenizer_config.json: a string, or an object with its content."""
    spelled = token.get("content") if isinstance(token, dict) else token
    return spelled if isinstance(spelled, str) else None


def _decoder_kinds(decoder: Any) -> list[str]:
    if not isinstance(decoder, dict):
        return []
    return [
        decoder.get("type", ""),
        *(kind for d in decoder.get("decoders", []) for kind in _decoder_kinds(d)),
    ]


def _pre_tokenizer(path: Path, name: str) -> pre_tokenizers.PreTokenizer:
    build = _PRE_TOKENIZERS.get(name)
    if build is None:
        raise UnknownModel(
            f"{path.name}: pre-tokenizer {name!r} is not known (known: {', '.join(sorted(_PRE_TOKENIZERS))}): "
            "serve the model from a Hugging Face folder",
            "model",
        )
    return build()


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    return build


def _pattern(num_digits: str) -> str:
    """Llama 3's and Qwen 2's pattern, which differ in how many digits stay together."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        + num_digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_PRE_TOKENIZERS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _digits_gpt2,
    "starcoder": _digits_gpt2,
    "refact": _digits_gpt2,
    "llama-bpe": _split(_pattern("{1,3}")),
    "qwen2": _split(_pattern("")),
}


def byte_level_bytes(tokens: Sequence[str], literal_ids: Iterable[int]) -> list[bytes]:
    """Bytes of a byte-level BPE vocabulary (Radford et al. 2019, GPT-2's ``bytes_to_unicode``).

    Args:
        tokens: spelling by id, in the printable alphabet that stands for bytes.
        literal_ids: added tokens, which are spelled as they are.
    """
    byte_of = {char: byte for byte, char in _bytes_to_unicode().items()}
    literal = frozenset(literal_ids)
    table: list[bytes] = []
    for token_id, token in enumerate(tokens):
        if token_id in literal or any(char not in byte_of for char in token):
            table.append(token.encode())
        else:
            table.append(bytes(byte_of[char] for char in token))
    return table


def sentencepiece_bytes(tokens: Sequence[str], literal_ids: Iterable[int]) -> list[bytes]:
    """Bytes of a SentencePiece vocabulary: U+2581 is a space, ``<0x0A>`` a byte.

    The space that SentencePiece drops at the start of a text is kept: an output continues its prompt.
    """
    literal = frozenset(literal_ids)
    table: list[bytes] = []
    for token_id, token in enumerate(tokens):
        if token_id in literal:
            table.append(token.encode())
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            table.append(bytes([int(token[3:5], 16)]))
        else:
            table.append(token.replace("\u2581", " ").encode())
    return table


def _bytes_to_unicode() -> Mapping[int, str]:
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    table.update({byte: chr(256 + i) for i, byte in enumerate(others)})
    return table
