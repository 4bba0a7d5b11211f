"""Grammars compiled at the door: what cannot be enforced is refused before any replica hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

from router.text.detokenizer import TokenTable
from workers.engine.errors import InvalidRequest
from workers.grammar import GrammarCompiler

MAX_REMEMBERED = 4096
"""Grammars of which it is known that they compile; 16 bytes each."""


class GrammarCheck:
    """Compiles in two threads of its own, so that grammars hold up neither tokens nor tokenizing."""

    def __init__(self, table: TokenTable, special_token_ids: frozenset[int], timeout_s: float = 5.0) -> None:
        """The compiler is built at the first use.

        Args:
            timeout_s: a grammar that is not compiled by then is refused; others may have been before it.
        """
        self._table = table
        self._special_token_ids = special_token_ids
        self._timeout_s = timeout_s
        self._compiler: GrammarCompiler | None = None
        self._threads = ThreadPoolExecutor(2, "grammar-check")
        self._accepted: dict[bytes, None] = {}
        """Digests of grammars that have compiled, the latest last."""

    @property
    def num_remembered(self) -> int:
        """Grammars that need not be compiled again."""
        return len(self._accepted)

    async def check(self, grammar: str, param: str) -> None:
        """Return if replicas can follow the grammar.

        Raises:
            InvalidRequest: they cannot; the message says why, and names ``param``.
        """
        digest = blake2b(grammar.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest in self._accepted:
            return
        loop = asyncio.get_running_loop()
        try:
            await asyncio.wait_for(
                loop.run_in_executor(self._threads, self._compile, grammar), self._timeout_s
            )
        except TimeoutError:
            raise InvalidRequest(
                f"{param}: is not compiled after {self._timeout_s:g} s: make it simpler", param
            ) from None
        except InvalidRequest as error:
            raise InvalidRequest(f"{param}: {error.message}", param) from None
        self._accepted[digest] = None
        if len(self._accepted) > MAX_REMEMBERED:
            del self._accepted[next(iter(self._accepted))]

    def close(self) -> None:
        """Let the threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: str) -> None:
        if self._compiler is None:
            self._compiler = make_compiler(self._table.with_special, self._special_token_ids)
        self._compiler.matcher(grammar)


def make_compiler(token_bytes: Sequence[bytes], special_token_ids: frozenset[int]) -> GrammarCompiler:
    """A compiler that only checks: which of the special tokens ends an output does not matter to it."""
    return GrammarCompiler(token_bytes, special_token_ids, sorted(special_token_ids)[:1] or [0])
