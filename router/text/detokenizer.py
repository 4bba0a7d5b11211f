"""Token ids to text, one token at a time, never showing half a character.

A token is bytes; text is their UTF-8 decoding. Concatenating the bytes of all tokens and decoding once gives
the same text as any way of pushing them one by one: that is the whole algorithm.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence

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
