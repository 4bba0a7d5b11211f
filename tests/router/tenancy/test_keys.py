"""Key files: what is read, what is refused, and that no message tells a key."""

from __future__ import annotations

import pytest

from router.tenancy.keys import digest_of, parse_keys, ring_of_keys
from workers.engine.errors import InvalidRequest

FILE = """
keys:
  - name: search
    key: sk-search-0123456789
    models: [llama-8b]
    requests_per_minute: 600
    tokens_per_minute: 200000
    max_concurrency: 32
    priority: -1
  - {{name: ops, key_sha256: {}, admin: true, cache_salt: shared}}
""".format(digest_of("sk-ops-0123456789"))


def test_a_key_is_found_with_its_rights() -> None:
    ring = parse_keys(FILE)

    search, ops = ring.find("sk-search-0123456789"), ring.find("sk-ops-0123456789")

    assert search is not None
    assert ops is not None
    assert (search.name, search.tokens_per_minute, search.priority) == ("search", 200000, -1)
    assert search.may_use("llama-8b")
    assert not search.may_use("other")
    assert ops.is_admin
    assert ops.may_use("other")


def test_an_unknown_key_is_nobodys() -> None:
    assert parse_keys(FILE).find("sk-search-012345678") is None
    assert parse_keys(FILE).find("") is None


def test_tenants_do_not_share_cached_prefixes_unless_they_say_so() -> None:
    search, ops = parse_keys(FILE).tenants

    assert (search.cache_salt, ops.cache_salt) == ("search", "shared")


def test_plain_lines_are_keys_without_limits() -> None:
    ring = parse_keys("# two of them\nsk-one\n\nsk-two\n")

    assert [tenant.name for tenant in ring.tenants] == ["key-1", "key-2"]
    assert ring.find("sk-two") is not None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("keys: []", "keys"),
        ("keys: [{name: a, key: sk-secret-12345, tokens_per_minute: 0}]", "keys.1.tokens_per_minute"),
        (
            "keys: [{name: a, key: sk-secret-12345, requests_per_minute: 5.0e-324}]",
            "keys.1.requests_per_minute",
        ),
        ("keys: [{name: a, key: sk-secret-12345, tokens_per_minute: 1.0e+300}]", "keys.1.tokens_per_minute"),
        (
            "keys: [{name: a, key: sk-secret-12345, max_concurrency: true}]",
            "max_concurrency .*true and false",
        ),
        ("keys: [{name: a, key: sk-secret-12345, colour: red}]", "keys.1.colour"),
        ("keys: [{name: a}]", "either key or key_sha256"),
        ("keys: [{name: a, key: sk-secret-12345}, {name: a, key: sk-secret-54321}]", "named 'a'"),
        ("keys: [{name: a, key: sk-secret-12345}, {name: b, key: sk-secret-12345}]", "twice"),
        ("keys: [{name: a, key: short}]", "keys.1.key"),
        ("keys: [{name: a, key: 'sk-secret-12345", "no YAML"),
    ],
)
def test_a_wrong_file_is_refused_without_telling_a_key(text: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        parse_keys(text)

    assert "sk-secret" not in str(caught.value)


def test_a_message_names_the_file_and_the_holder() -> None:
    text = "keys: [{name: good, key: sk-secret-12345}, {name: search, key: short}]"

    with pytest.raises(InvalidRequest, match=r"/etc/keys.yaml: keys.2.key \(of 'search'\): .* 8 characters"):
        parse_keys(text, "/etc/keys.yaml")


def test_an_empty_key_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        ring_of_keys(["sk-one", " "])
