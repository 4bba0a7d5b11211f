"""Token ids to text, one token at a time, never showing half a character.

A token is bytes; text is their UTF-8 decoding. Concatenating the bytes of all tokens and decoding once gives
the same text as any way of pushing them one by one: that is the whole algorithm.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

_new_decoder = codecs.getincrementaldecoder("utf-8")


class TokenTable:
    """The bytes of each token of a vocabulary; shared by all requests, never changed.

    ``with_special`` and ``without_special`` differ in special tokens, which are empty in the latter.
    """

    def __init__(self, token_bytes: Sequence[bytes], special_token_ids: Iterable[int]) -> None:
        self.with_special = tuple(token_bytes)
        special = frozenset(special_token_ids)
        self.without_special = tuple(b"" if i in special else data for i, data in enumerate(token_bytes))

    def __len__(self) -> int:
        return len(self.with_special)

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes of one token, special or not; empty for ids that pad the vocabulary."""
        return self.with_special[token_id] if token_id < len(self.with_special) else b""

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a finished sequence."""
        table = self.without_special if skip_special_tokens else self.with_special
        return b"".join(table[i] for i in token_ids if i < len(table)).decode("utf-8", "replace")


class Detokenizer:
    """Text of one growing output. Bytes that can never become a character turn into U+FFFD, once known."""

    __slots__ = ("_decode", "_table")

    def __init__(self, table: TokenTable, *, skip_special_tokens: bool = True) -> None:
        self._table = table.without_special if skip_special_tokens else table.with_special
        self._decode = _new_decoder("replace").decode

    def push(self, token_id: int) -> str:
        """Text that ``token_id`` completes; empty while a character is incomplete."""
        try:
            return self._decode(self._table[token_id])
        except IndexError:  # an id that pads the vocabulary
            return ""

    def flush(self) -> str:
        """Text of what is left at the end: an incomplete character shows as U+FFFD."""
        return self._decode(b"", True)
