"""Grammars compiled at the door: what cannot be enforced is refused before any replica hears of it."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

from router.text.detokenizer import TokenTable
from router.text.grammar_process import GrammarProcess, Vocabulary
from workers.engine.errors import InvalidRequest

MAX_REMEMBERED = 4096
"""Grammars of which it is known that they compile; 16 bytes each."""


class GrammarCheck:
    """Compiles in two processes beside this one: one grammar that takes its time holds up no other, nor any token."""

    def __init__(self, table: TokenTable, special_token_ids: frozenset[int], **limits: float) -> None:
        """The processes are started at the first use; ``limits`` are those of a ``Vocabulary``."""
        self._vocabulary = Vocabulary(table.with_special, sorted(special_token_ids), **limits)  # type: ignore[arg-type]
        self._threads = ThreadPoolExecutor(2, "grammar-check")
        self._of_thread = threading.local()
        self._processes: list[GrammarProcess] = []
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
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._compile, grammar)
        except InvalidRequest as error:
            raise InvalidRequest(f"{param}: {error.message}", param) from None
        self._accepted[digest] = None
        if len(self._accepted) > MAX_REMEMBERED:
            del self._accepted[next(iter(self._accepted))]

    def close(self) -> None:
        """Let the threads and their processes go."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.close()

    def _compile(self, grammar: str) -> None:
        process: GrammarProcess | None = getattr(self._of_thread, "process", None)
        if process is None:
            process = self._of_thread.process = GrammarProcess(self._vocabulary)
            self._processes.append(process)
        process.check(grammar)
