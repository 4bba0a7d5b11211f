"""Prompts and sampling parameters of offline callers as the engine's requests, one for each choice."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from deploy.offline.choice import Choice
from deploy.offline.outputs import RequestOutput
from deploy.offline.prompts import Prompt, encoded
from deploy.offline.sampling_params import SamplingParams
from router.text.grammar_process import GrammarProcess, Vocabulary
from router.text.stop import StopStrings
from router.text.tokenizer import Tokenizer
from workers.engine.constraint import Matcher
from workers.engine.errors import InvalidRequest, PromptTooLong
from workers.engine.request import EngineRequest
from workers.grammar import GrammarCompiler
from workers.mask_threads import spare_threads

_MAX_REMEMBERED = 64
"""Grammars of which it is known that they compile."""
_PLAIN = SamplingParams()


@dataclass(frozen=True, slots=True)
class WrittenRequest:
    """What the engine is given for one choice, and what collects its tokens."""

    request: EngineRequest
    choice: Choice
    matcher: Matcher | None


class RequestWriter:
    """Numbers prompts, encodes them, checks them against the model's context and draws their seeds."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        seed: int,
    ) -> None:
        """Write for a model; without ``tokenizer`` prompts are token ids."""
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._ids = itertools.count()
        self._seeds = random.Random(seed)

    def prepare(
        self, prompt: Prompt, params: SamplingParams = _PLAIN, *, has_output: bool = True
    ) -> RequestOutput:
        """Return the output of ``prompt``, with nothing in it yet; without ``has_output`` nothing is generated.

        Raises:
            UserError: the prompt cannot be served, or its parameters need a tokenizer.
        """
        text, token_ids = encoded(prompt, self._tokenizer)
        params.check_vocabulary(self._vocab_size)
        longest, keep = self._max_model_len - has_output, params.truncate_prompt_tokens
        if keep is not None:
            token_ids = token_ids[-(longest if keep == -1 else keep) :]
        if not token_ids:
            raise InvalidRequest("the prompt has no tokens, it must have at least one", "prompt")
        if len(token_ids) > longest:
            output = " with its output" if has_output else ""
            raise PromptTooLong(
                f"the prompt has {len(token_ids)} tokens, this model takes {self._max_model_len}{output}: "
                "shorten it or raise max_model_len",
                "prompt",
            )
        if params.needs_tokenizer and self._tokenizer is None:
            raise InvalidRequest(
                "stop, bad_words and structured_outputs need the tokenizer: leave out skip_tokenizer_init",
                "stop",
            )
        return RequestOutput(str(next(self._ids)), text, token_ids, [])

    def write(self, output: RequestOutput, params: SamplingParams, priority: int) -> Iterator[WrittenRequest]:
        """Yield the requests of the choices of ``output``; each takes its place among the outputs."""
        seed = self._seeds.getrandbits(63)
        left = self._max_model_len - len(output.prompt_token_ids)
        bad_words = self._bad_words(params)
        stops = StopStrings(params.stop_strings)
        for index in range(params.num_choices):
            choice = Choice(output, index, params, self._tokenizer, stops)
            wanted = params.choice(index, seed, left, bad_words)
            request = EngineRequest(
                f"{output.request_id}-{index}", output.prompt_token_ids, wanted, priority=priority
            )
            yield WrittenRequest(request, choice, self._matcher(wanted.grammar) if wanted.grammar else None)

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token ids of each bad word, at the beginning of a text and after a space."""
        if not params.bad_words:
            return ()
        assert self._tokenizer is not None, "a request that needs the tokenizer is refused without"
        spelled = [word for bad in params.bad_words for word in (bad, " " + bad.lstrip())]
        return tuple(dict.fromkeys(tuple(self._tokenizer.encode_literally(word)) for word in spelled))

    def close(self) -> None:
        """End what it has started."""
        if "_grammar_process" in self.__dict__:
            self._grammar_process.close()

    def _matcher(self, grammar: str) -> Matcher:
        self._check_grammar(grammar)
        return self._grammars.matcher(grammar)

    @cached_property
    def _check_grammar(self) -> Callable[[str], None]:
        """What compiles elsewhere does not take this process along; a batch's grammar is tried once."""
        return lru_cache(_MAX_REMEMBERED)(self._grammar_process.check)

    @cached_property
    def _grammar_process(self) -> GrammarProcess:
        assert self._tokenizer is not None, "a request that needs the tokenizer is refused without"
        table = self._tokenizer.table
        return GrammarProcess(Vocabulary(table.with_special, sorted(self._tokenizer.special_token_ids)))

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        """Made when first needed: it takes a tenth of a second."""
        assert self._tokenizer is not None, "a request that needs the tokenizer is refused without"
        table = self._tokenizer.table
        token_bytes = [table.bytes_of(token_id) for token_id in range(len(table))]
        return GrammarCompiler(
            token_bytes, self._tokenizer.special_token_ids, self._eos_token_ids, spare_threads()
        )
