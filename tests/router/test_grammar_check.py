"""Which grammars have been found to compile is remembered for some of them, however many come."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from router.text import grammar_check
from router.text.grammar_check import GrammarCheck


async def test_ten_times_as_many_grammars_as_are_remembered_leave_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_check, "MAX_REMEMBERED", 4)
    bytes_alone = SimpleNamespace(with_special=[bytes([byte]) for byte in range(256)] + [b"<end>"])
    check = GrammarCheck(bytes_alone, frozenset({256}))  # type: ignore[arg-type]

    for number in range(40):
        await check.check(f'start: "{number}"', "guided_grammar")

    assert check.num_remembered == 4
    check.close()
