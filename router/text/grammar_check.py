"""Grammars compiled at the door: what cannot be enforced is refused before any replica hears of it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

import msgspec

from router.text.detokenizer import TokenTable
from router.text.grammar_process import GrammarProcess, TooSlow, Vocabulary
from workers.engine.errors import InvalidRequest

MAX_REMEMBERED = 4096
"""Grammars of which it is known that they compile; 16 bytes each."""
_QUICK_CPU_S = 0.2
"""A schema of five properties takes half a millisecond, 10,000 choices 0.13 s."""


class GrammarCheck:
    """Compiles in processes beside this one: a quick one for all grammars, a patient one for those that it gives up.

    So one that takes its time, or never ends, holds up no other for long, nor any token.
    """

    def __init__(self, table: TokenTable, special_token_ids: frozenset[int], **limits: float) -> None:
        """The processes are started at the first use; ``limits`` are those of a ``Vocabulary``."""
        patient = Vocabulary(table.with_special, sorted(special_token_ids), **limits)  # type: ignore[arg-type]
        quick = msgspec.structs.replace(patient, cpu_s=min(patient.cpu_s, _QUICK_CPU_S))
        self._processes = [GrammarProcess(quick), GrammarProcess(patient)]
        self._threads = [ThreadPoolExecutor(1, "grammar-check") for _ in self._processes]
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
            try:
                await self._compile(0, grammar)
            except TooSlow:
                await self._compile(1, grammar)
        except InvalidRequest as error:
            raise InvalidRequest(f"{param}: {error.message}", param) from None
        self._accepted[digest] = None
        if len(self._accepted) > MAX_REMEMBERED:
            del self._accepted[next(iter(self._accepted))]

    def close(self) -> None:
        """Let the threads and their processes go."""
        for thread, process in zip(self._threads, self._processes, strict=True):
            thread.shutdown(wait=False, cancel_futures=True)
            process.close()

    async def _compile(self, which: int, grammar: str) -> None:
        check = self._processes[which].check
        await asyncio.get_running_loop().run_in_executor(self._threads[which], check, grammar)
