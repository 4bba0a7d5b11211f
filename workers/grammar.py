"""Grammars over token ids, by llguidance (https://github.com/guidance-ai/llguidance): from text to matchers.

A grammar is text in one of llguidance's own forms: a Lark grammar, or the JSON that its ``grammar_from_...``
functions give. The edge compiles it to refuse it early, the brain to follow it. llguidance needs no torch.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import llguidance

from workers.engine.constraint import GrammarFailed, Matcher
from workers.engine.errors import InvalidRequest
from workers.library_failure import is_failure
from workers.mask_threads import MaskThreads

log = logging.getLogger("shoal.grammar")
_Answer = TypeVar("_Answer")

_MAX_STATES = 10_000
"""Of the automaton that a matcher builds as it goes."""

_LIMITS = llguidance.LLParserLimits(
    # States bound memory (2 kB each) and time, both on one core of an AMD EPYC (Zen 4): (a{1000}){1000} is refused
    # after 0.4 s in a thread at the door, and the slowest mask of a running request that was found, in
    # 0123(a{300}){300}, takes 19 ms.
    max_lexer_states=_MAX_STATES,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


SLICES = [*llguidance.LLTokenizer.general_slices(), "[a-z]{1,8}", "[A-Za-z0-9_]{1,8}"]
"""Sorts of tokens that are allowed or not as a whole where a lexeme takes all of them. llguidance's own are the insides
of JSON strings; with words of letters, masks of expressions that take words cost a third to a half less
(``tests/workers/measure_masks.py``)."""

_TOO_MUCH = (
    "toocomplex",
    "too many states",
    "too many expressions",
    "too many items",
    "too big",
    "max is",
    "fuel",
)
"""Words of llguidance for a grammar that reaches one of its limits, here or further on."""


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Thread-safe; compiling holds no lock of the interpreter."""

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        special_token_ids: Iterable[int],
        eos_token_ids: Sequence[int],
        num_threads: int = 1,
    ) -> None:
        """Build the trie of all tokens: about 0.1 s for 50,000.

        Args:
            token_bytes: by token id.
            special_token_ids: tokens that no text of a grammar matches, only their names in ``<>``.
            eos_token_ids: tokens that may come where the grammar is satisfied.
            num_threads: for the masks of many matchers; see ``Matcher.prepare``.
        """
        wrapper = llguidance.TokenizerWrapper(_Tokens(token_bytes, special_token_ids, eos_token_ids))
        self._tokenizer = llguidance.LLTokenizer(wrapper, eos_token=list(eos_token_ids), slices=SLICES)
        self._ends = sum(1 << token_id for token_id in eos_token_ids)
        self._threads = MaskThreads(len(token_bytes), num_threads)

    def matcher(self, grammar: str) -> GrammarMatcher:
        """A matcher at the beginning of its output. Takes from half a millisecond to half a second.

        Raises:
            InvalidRequest: the grammar makes no sense, is too large, or matches nothing, or llguidance fails on it.
        """
        try:
            return GrammarMatcher(self._compiled(grammar), self._threads)
        except BaseException as error:
            if isinstance(error, InvalidRequest) or not is_failure(error):
                raise
            log.exception("llguidance failed while it compiled a grammar")
            raise InvalidRequest(
                f"cannot be compiled ({type(error).__name__}): make it simpler", "grammar"
            ) from error

    def allows(self, grammar: str, token_ids: Iterable[int]) -> bool:
        """True if an output may begin with these tokens."""
        matcher = self.matcher(grammar)
        try:
            for token_id in token_ids:
                matcher.accept(token_id)
        except GrammarFailed:
            return False
        return True

    def _compiled(self, grammar: str) -> llguidance.LLMatcher:
        found = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if not found.is_error():
            self._try(found)  # much of the work is put off until here
        if found.is_error():
            raise InvalidRequest(_explained(found.get_error()), "grammar")
        return found

    def _try(self, matcher: llguidance.LLMatcher) -> None:
        """Begin, and go on by a token: what the first mask has cost is held against the second.

        Raises:
            InvalidRequest: no more than the beginning of the grammar can be followed.
        """
        allowed = int.from_bytes(matcher.compute_bitmask(), "little") & ~self._ends
        if matcher.is_error() or not allowed:
            return
        ahead = matcher.deep_copy()
        ahead.consume_token((allowed & -allowed).bit_length() - 1)
        if not ahead.is_error() and not ahead.is_stopped():
            ahead.compute_bitmask()
        if ahead.is_error():
            raise InvalidRequest(_explained(ahead.get_error()), "grammar")


class GrammarMatcher:
    """Follows one output. A ``Matcher``; where llguidance fails, it is this grammar that can go no further."""

    __slots__ = ("_failure", "_made", "_matcher", "_threads")

    def __init__(self, matcher: llguidance.LLMatcher, threads: MaskThreads) -> None:
        self._matcher = matcher
        self._threads = threads
        self._made: bytes | None = None
        """The next mask, where it was made beside others."""
        self._failure: str | None = None
        """Of llguidance itself; what it says from then on means nothing."""

    @property
    def is_complete(self) -> bool:
        """See ``Matcher``."""
        try:
            return bool(self._ask(self._matcher.is_stopped)) and not self._ask(self._matcher.is_error)
        except GrammarFailed:  # said at the next mask
            return False

    @property
    def is_accepting(self) -> bool:
        """True if the output so far is a whole one."""
        return bool(self._matcher.is_accepting())

    def prepare(self, others: Sequence[Matcher]) -> None:
        """See ``Matcher``."""
        together = [self, *(other for other in others if isinstance(other, GrammarMatcher))]
        made = self._threads.masks([one._matcher for one in together])
        for one, mask in zip(together, made or (), strict=False):
            one._made = mask

    def mask(self) -> bytes:
        """See ``Matcher``."""
        made, self._made = self._made, None
        allowed = self._ask(self._matcher.compute_bitmask) if made is None else made
        self._check()
        return allowed

    def accept(self, token_id: int) -> None:
        """See ``Matcher``."""
        self._made = None
        if not self._ask(self._matcher.consume_token, token_id):
            self._check()

    def _check(self) -> None:
        if self._ask(self._matcher.is_error):
            raise GrammarFailed(_explained(self._ask(self._matcher.get_error)))

    def _ask(self, method: Callable[..., _Answer], *arguments: object) -> _Answer:
        """What llguidance answers.

        Raises:
            GrammarFailed: it fails, or has failed before.
        """
        if self._failure is None:
            try:
                return method(*arguments)
            except BaseException as error:
                if not is_failure(error):
                    raise
                log.exception("llguidance failed while it followed a grammar")
                self._failure = f"cannot be followed any further ({type(error).__name__}): make it simpler"
        raise GrammarFailed(self._failure)


class _Tokens:
    """A vocabulary as llguidance asks for it."""

    def __init__(
        self, token_bytes: Sequence[bytes], special_token_ids: Iterable[int], eos_token_ids: Sequence[int]
    ) -> None:
        self.tokens = list(token_bytes)
        self.special_token_ids = sorted(special_token_ids)
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = None
        self._by_bytes = {token: i for i, token in enumerate(self.tokens)}

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens of a text, a byte each: llguidance asks once, to see that there is a tokenizer."""
        data = text.encode() if isinstance(text, str) else text
        return [self._by_bytes[bytes([byte])] for byte in data if bytes([byte]) in self._by_bytes]


def _explained(message: str) -> str:
    """llguidance's words on one line, without the grammar that stands below them; its codes in ours."""
    told = re.split(r"\n +\d+ \| ", message.replace("<non-verbose/>", ""), maxsplit=1)[0]
    # Where a schema stands in a grammar of ours means nothing to whoever wrote it.
    message = " ".join(re.sub(r"^at \d+\(\d+\): (?=failed to compile JSON)", "", told).split())[:500]
    if message.startswith("NoExtension"):
        return "nothing can match it"
    if any(words in message.lower() for words in _TOO_MUCH):
        return (
            f"it grows beyond {_MAX_STATES:,} states while it is followed: make it simpler, with fewer or shorter "
            "alternatives and repeats"
        )
    return message
