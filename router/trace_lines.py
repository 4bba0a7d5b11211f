"""One recorded request as a line of a trace, in each format (``router.trace``); a wrong one is refused by its field."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from workers.engine.block_hash import HASH_BYTES

FORMAT, VERSION = "shoal-trace", 1
MOONCAKE_BLOCK_SIZE = 512
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
MOST_TOKENS = 10_000_000
"""The longest context that a model is said to have (Llama 4 Scout): prompts are simulated token by token."""
_MOST_S = 1e11
"""Of an arrival; seconds since 1970 are far fewer."""
_SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hashes: list[bytes]
    """Chained hashes of the prompt's full blocks."""


LineReader = Callable[[str], TraceRequest]
"""Reads a line, or raises ValueError."""


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Header(_Line):
    format: Literal["shoal-trace"]
    version: Literal[1]
    block_size: int = Field(ge=1, le=1 << 20)


class _ShoalLine(_Line):
    arrival_s: float = Field(ge=0, le=_MOST_S)
    num_prompt_tokens: int = Field(ge=1, le=MOST_TOKENS)
    num_output_tokens: int = Field(ge=0, le=MOST_TOKENS)
    block_hashes: list[Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * HASH_BYTES}}}$")]]


class _MooncakeLine(_Line):
    timestamp: float = Field(ge=0, le=1000 * _MOST_S)
    input_length: int = Field(ge=1, le=MOST_TOKENS)
    output_length: int = Field(ge=0, le=MOST_TOKENS)
    hash_ids: list[Annotated[int, Field(ge=0, lt=1 << 8 * HASH_BYTES)]]

    @model_validator(mode="after")
    def _has_an_id_for_each_block(self) -> _MooncakeLine:
        num_full, num_ids = self.input_length // MOONCAKE_BLOCK_SIZE, len(self.hash_ids)
        num_blocks = -(-self.input_length // MOONCAKE_BLOCK_SIZE)
        if not num_full <= num_ids <= num_blocks:
            raise ValueError(
                f"lengths and blocks do not agree: input_length {self.input_length} has {num_blocks} blocks of "
                f"{MOONCAKE_BLOCK_SIZE}, hash_ids has {num_ids}"
            )
        return self


def header_line(block_size: int) -> str:
    """The first line of a file in Shoal's own format."""
    return json.dumps({"format": FORMAT, "version": VERSION, "block_size": block_size}) + "\n"


def request_line(one: TraceRequest) -> str:
    """One request in Shoal's own format."""
    line = {
        "arrival_s": round(one.arrival_s, 6),
        "num_prompt_tokens": one.num_prompt_tokens,
        "num_output_tokens": one.num_output_tokens,
        "block_hashes": [block_hash.hex() for block_hash in one.hashes],
    }
    return json.dumps(line) + "\n"


def is_header(line: str) -> bool:
    """Whether a first line says that the file is in Shoal's own format."""
    try:
        value = json.loads(line)
    except ValueError:
        return False
    return isinstance(value, dict) and value.get("format") == FORMAT


def read_header(line: str) -> int:
    """The block size that a header tells.

    Raises:
        ValueError: it is of another version, or tells none.
    """
    return _Header.model_validate_json(line).block_size


def shoal_reader(block_size: int) -> LineReader:
    """Reads lines behind a header with this block size."""

    def read(line: str) -> TraceRequest:
        told = _ShoalLine.model_validate_json(line)
        num_hashes, num_full = len(told.block_hashes), told.num_prompt_tokens // block_size
        if num_hashes not in (0, num_full):  # none: they are not known
            raise ValueError(
                f"lengths and blocks do not agree: num_prompt_tokens {told.num_prompt_tokens} has {num_full} full "
                f"blocks of {block_size}, block_hashes has {num_hashes}"
            )
        hashes = [bytes.fromhex(block_hash) for block_hash in told.block_hashes]
        return TraceRequest(told.arrival_s, told.num_prompt_tokens, told.num_output_tokens, hashes)

    return read


def read_mooncake(line: str) -> TraceRequest:
    """A line of Mooncake's format."""
    told = _MooncakeLine.model_validate_json(line)
    num_full = told.input_length // MOONCAKE_BLOCK_SIZE
    hashes = [block_id.to_bytes(HASH_BYTES, "big") for block_id in told.hash_ids[:num_full]]
    return TraceRequest(told.timestamp / 1000, told.input_length, told.output_length, hashes)


def read_azure(line: str) -> TraceRequest:
    """A line of Azure's table, with seconds since 1970."""
    cells = line.strip().split(",")
    names = AZURE_HEADER.split(",")
    if len(cells) != len(names):
        raise ValueError(f"it has {len(cells)} cells, it must have {len(names)}: {AZURE_HEADER}")
    try:
        # Python reads microseconds; the tables have one digit more.
        arrival_s = datetime.fromisoformat(cells[0][:26]).replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise ValueError(f"{names[0]} is {_shown(cells[0])}: it must be a date and a time") from None
    lengths = []
    for name, cell, least in ((names[1], cells[1], 1), (names[2], cells[2], 0)):
        is_number = cell.isdecimal() and len(cell) <= len(str(MOST_TOKENS))
        if not is_number or not least <= int(cell) <= MOST_TOKENS:
            raise ValueError(
                f"{name} is {_shown(cell)}: it must be a whole number from {least} to {MOST_TOKENS}"
            )
        lengths.append(int(cell))
    return TraceRequest(arrival_s, lengths[0], lengths[1], [])


def refusal(error: ValueError) -> str:
    """What is wrong with a line, by field and value."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    name = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"{name} is missing"
    if first["type"] == "model_type":
        return f"it is {_shown(first['input'])}, a request is an object"
    return f"{name} is {_shown(first['input'])}: {message}" if name else message


def _shown(value: Any) -> str:
    """A value of a line, cut where it is long."""
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
