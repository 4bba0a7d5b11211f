"""Detokenizing: any pace gives the text of the whole, and never half a character."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.text.detokenizer import Detokenizer, TokenTable
from workers.checkpoint.vocabulary import byte_level_bytes, sentencepiece_bytes

BYTES = TokenTable([bytes([i]) for i in range(256)] + [b"<|end|>"], [256])


@given(st.text(max_size=30))
def test_one_token_at_a_time_gives_the_text(text: str) -> None:
    detokenizer = Detokenizer(BYTES)

    pieces = [detokenizer.push(byte) for byte in text.encode()]

    assert "".join(pieces) + detokenizer.flush() == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@given(st.lists(st.integers(0, 256), max_size=40), st.booleans())
def test_bytes_that_are_no_text_decode_as_the_whole_does(token_ids: list[int], skip: bool) -> None:
    detokenizer = Detokenizer(BYTES, skip_special_tokens=skip)

    text = "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()

    assert text == BYTES.decode(token_ids, skip_special_tokens=skip)


def test_an_id_that_pads_the_vocabulary_is_empty() -> None:
    assert Detokenizer(BYTES).push(99_999) == ""
    assert BYTES.decode([104, 99_999, 105]) == "hi"


def test_byte_level_spellings_are_bytes_and_added_tokens_are_literal() -> None:
    assert byte_level_bytes(["Ġhé", "Ċ", "Ġé"], [2]) == [b" h\xe9", b"\n", "Ġé".encode()]


def test_sentencepiece_spellings_are_spaces_and_bytes() -> None:
    assert sentencepiece_bytes(["▁the", "<0x0A>", "<s>"], [2]) == [b" the", b"\n", b"<s>"]
