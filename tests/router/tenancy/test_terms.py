"""A caller's own salt and priority: a request can narrow them, and not leave them."""

from __future__ import annotations

from router.journal import Prompt, PromptTerms
from router.placement.replica_view import ReplicaShape

SHAPE = ReplicaShape(hash_root=b"root", block_size=4)


def hashes(caller: str, own: str = "") -> list[bytes]:
    prompt = Prompt(list(range(8)), PromptTerms(cache_salt=own))
    prompt.hashes(SHAPE)  # a long prompt is hashed before its caller is known
    prompt.terms = prompt.terms.within(caller, caller, 0)
    return prompt.hashes(SHAPE)


def test_callers_share_no_block_whatever_salt_their_requests_name() -> None:
    chains = [hashes("a"), hashes("b"), hashes("a", "b"), hashes("b", "a"), hashes("", "a"), hashes("")]

    assert len({chain[0] for chain in chains}) == len(chains)


def test_requests_of_one_caller_share_blocks() -> None:
    assert hashes("a") == hashes("a")
    assert hashes("a", "x") == hashes("a", "x")


def test_a_request_may_wait_longer_than_its_caller_must_and_not_shorter() -> None:
    assert PromptTerms(priority=-9).within("a", "a", 2).priority == 2
    assert PromptTerms(priority=3).within("a", "a", 2).priority == 5
    assert (
        PromptTerms(priority=-9).within("", "", 0).priority == -9
    )  # where there are no keys, callers set it themselves
