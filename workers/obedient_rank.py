"""A rank whose model says what a script wants as far as masks allow, and else takes the shortest way out.

With it what a client gets is known beforehand, though grammars, brain and edge are the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workers.engine.config import EngineConfig
from workers.scripted_rank import ScriptedRank, ScriptedRow, allows

Script = Callable[[bytes], bytes]
"""From the text of a prompt to the text that follows it."""

# The shortest way to the end of a JSON document first: close what is open, then the shortest values.
_OUTSIDE, _INSIDE = b'}],:"0123456789-nt[{falseru.eE+', b'"@.-0123456789abcdefghijklmnopqrstuvwxyz'


def _nothing(prompt: bytes) -> bytes:
    return b""


class ObedientRank(ScriptedRank):
    """Speaks in tokens of one byte, whatever else the vocabulary has. An ``Executor``."""

    def __init__(self, config: EngineConfig, token_bytes: Sequence[bytes], script: Script = _nothing) -> None:
        """Start empty; the first of the engine's end-of-sequence tokens ends every text."""
        super().__init__(config, len(token_bytes))
        known = {token: i for i, token in enumerate(token_bytes) if len(token) == 1}
        self._end = config.eos_token_ids[0]
        self._bytes = {i: token for token, i in known.items()}
        self._ids = {token[0]: i for token, i in known.items()}
        self._orders = [self._in_order(first) for first in (_OUTSIDE, _INSIDE)]
        self._script = script

    def choose(self, row: ScriptedRow, allowed: bytes | None) -> int:
        """See ``ScriptedRank``."""
        said = self._text(row.token_ids[row.num_prompt_tokens :])
        wanted = self._script(self._text(row.token_ids[: row.num_prompt_tokens]))
        if wanted.startswith(said):
            token_id = self._ids[wanted[len(said)]] if len(said) < len(wanted) else self._end
            if allows(allowed, token_id):
                return token_id
        order = self._orders[_is_inside_string(said)]
        return next(token_id for token_id in order if allows(allowed, token_id))

    def _in_order(self, first: bytes) -> list[int]:
        return [self._end, *(self._ids[byte] for byte in (*first, *range(256)) if byte in self._ids)]

    def _text(self, token_ids: Sequence[int]) -> bytes:
        return b"".join(self._bytes.get(token_id, b"") for token_id in token_ids)


def _is_inside_string(text: bytes) -> bool:
    """True if a string of JSON is open at the end of a text."""
    is_inside = is_escaped = False
    for byte in text:
        is_inside ^= byte == ord('"') and not is_escaped
        is_escaped = byte == ord("\\") and not is_escaped
    return is_inside
