"""API keys as a file says them: who a caller is, and what this caller may have. Knows no HTTP and no clock.

A key file is YAML (or JSON, which is YAML)::

    keys:
      - name: search                # in metrics and logs; never the key itself
        key: sk-...                 # 8 characters or more; or key_sha256 (64 hex digits): the file holds no secret
        models: [llama-8b]          # left out: all
        requests_per_minute: 600    # left out: no limit; likewise the next two
        tokens_per_minute: 200000   # prompt and output tokens together
        max_concurrency: 32
        priority: 0                 # smaller is served first
        cache_salt: team-a          # callers with equal salts share cached prefixes; left out: the name
        admin: false                # may read /ui and /metrics

or plain lines, a key each, without limits, all of them sharing cached prefixes.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from workers.engine.errors import InvalidRequest

_PLAIN_KEY = re.compile(r"[^\s:{}\[\],\"'-][^\s:{}\[\],\"']*")
"""A line that is a key and no YAML of any meaning."""

_PerMinute = Annotated[float, Field(ge=0.001, le=1e15, allow_inf_nan=False)]
"""A limit; what a caller may have to wait for is then a time that can be told."""
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$", to_lower=True)]


@dataclass(frozen=True, slots=True)
class Tenant:
    """One key's holder and rights; the key itself is kept as a digest only."""

    name: str
    key_sha256: str = ""
    models: frozenset[str] | None = None
    """None: all models."""
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_concurrency: int | None = None
    priority: int = 0
    cache_salt: str = ""
    is_admin: bool = False

    def may_use(self, model: str) -> bool:
        """True if the key allows this served name."""
        return self.models is None or model in self.models


FORMS = "give a list 'keys' (YAML), or plain keys, one a line"
"""What a key file may hold, for those whose file holds something else."""
ANYBODY = Tenant("anonymous", is_admin=True)
"""Whoever calls where no keys are set."""


class KeyRing:
    """All keys that are valid now. Frozen: a changed file is a new ring."""

    def __init__(self, tenants: Iterable[Tenant] = ()) -> None:
        self.tenants = tuple(tenants)
        self._by_digest = {tenant.key_sha256: tenant for tenant in self.tenants}

    def __len__(self) -> int:
        return len(self.tenants)

    def find(self, key: str) -> Tenant | None:
        """The holder of ``key``; the time this takes says nothing about the keys."""
        given = digest_of(key)
        found = self._by_digest.get(given)
        return found if found is not None and hmac.compare_digest(found.key_sha256, given) else None


def digest_of(key: str) -> str:
    """SHA-256 of a key, as ``key_sha256`` has it. Keys are long random words, so that no slow hash is needed."""
    return hashlib.sha256(key.encode()).hexdigest()


def ring_of_keys(keys: Iterable[str]) -> KeyRing:
    """Keys as flags give them: without limits, named by their place; the first may read the metrics.

    Raises:
        InvalidRequest: a key is empty or stands there twice.
    """
    found = [key.strip() for key in keys]
    if not all(found):
        raise InvalidRequest("an API key is empty: give each a value", "api_key")
    return _ring(
        [Tenant(f"key-{i}", digest_of(key), is_admin=i == 1) for i, key in enumerate(found, start=1)]
    )


def parse_keys(text: str, path: str = "") -> KeyRing:
    """Read what a key file, the one at ``path``, holds.

    Raises:
        InvalidRequest: what is wrong, in which file and for which holder; no key's value is in the message.
    """
    try:
        return _parsed(text)
    except InvalidRequest as error:
        raise InvalidRequest(f"the key file {path}".rstrip() + f": {error.message}", "api_keys") from None


def _parsed(text: str) -> KeyRing:
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if keys and all(map(_PLAIN_KEY.fullmatch, keys)):
        return ring_of_keys(keys)
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise InvalidRequest(f"it is no YAML{where}", "api_keys") from None
    if not isinstance(content, dict):
        raise InvalidRequest(f"it holds no keys: {FORMS}", "api_keys")
    try:
        parsed = _File.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        message = first["msg"].removeprefix("Value error, ")
        message = message[:1].lower() + message[1:]
        raise InvalidRequest(f"{_place(first['loc'], content)}: {message}", "api_keys") from None
    return _ring([record.tenant() for record in parsed.keys])


def _place(loc: tuple[int | str, ...], content: dict[str, object]) -> str:
    """Where in the file, with the holder's name: ``keys.2.key (of 'search')``."""
    place = ".".join(str(part + 1 if isinstance(part, int) else part) for part in loc)
    records = content.get("keys")
    if len(loc) > 1 and isinstance(loc[1], int) and isinstance(records, list):
        record = records[loc[1]]
        name = record.get("name") if isinstance(record, dict) else None
        if isinstance(name, str):
            place += f" (of {name[:63]!r})"
    return place or "the whole file"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9._@-]+$")
    key: str | None = Field(None, min_length=8, max_length=1024)
    key_sha256: Digest | None = None
    models: list[str] | None = None
    requests_per_minute: _PerMinute | None = None
    tokens_per_minute: _PerMinute | None = None
    max_concurrency: int | None = Field(None, ge=1, le=1 << 31)
    priority: int = Field(0, ge=-1000, le=1000)
    cache_salt: str | None = Field(None, max_length=256)
    admin: bool = False

    @field_validator("requests_per_minute", "tokens_per_minute", "max_concurrency", "priority", mode="before")
    @classmethod
    def _no_truth_value_is_a_number(cls, value: object) -> object:
        if isinstance(value, bool):
            raise ValueError("true and false are no value of it, a number is")
        return value

    @model_validator(mode="after")
    def _one_key(self) -> _Record:
        if (self.key is None) == (self.key_sha256 is None):
            raise ValueError("give either key or key_sha256")
        return self

    def tenant(self) -> Tenant:
        digest = self.key_sha256 or digest_of(self.key or "")
        return Tenant(
            name=self.name,
            key_sha256=digest,
            models=None if self.models is None else frozenset(self.models),
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            max_concurrency=self.max_concurrency,
            priority=self.priority,
            cache_salt=self.name if self.cache_salt is None else self.cache_salt,
            is_admin=self.admin,
        )


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: list[_Record] = Field(min_length=1)


def _ring(tenants: list[Tenant]) -> KeyRing:
    names = [tenant.name for tenant in tenants]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequest(f"two API keys are named {name!r}: give each its own name", "api_keys")
    if len({tenant.key_sha256 for tenant in tenants}) < len(tenants):
        raise InvalidRequest("one API key stands there twice: give each holder its own", "api_keys")
    return KeyRing(tenants)
