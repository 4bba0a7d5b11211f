"""How offline callers say what to sample; argument names are those of vLLM's ``SamplingParams``."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Real

from deploy.offline.ranges import check_flag, check_integer, check_number, is_integer
from deploy.offline.structured import StructuredOutputsParams
from workers.engine.errors import InvalidRequest
from workers.engine.request import ChoiceParams

MOST_CHOICES = 16384
"""Outputs of one prompt."""
_MOST_BIAS = 3.4e38
"""About the largest float32, which logits are biased in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of one prompt.

    Raises:
        InvalidRequest: a value is out of range; it names the field, the value and the range.
    """

    n: int = 1
    """Outputs of the prompt."""
    best_of: int | None = None
    """Compute so many and give the ``n`` with the highest mean log-probability of a token; None: ``n``."""
    max_tokens: int | None = 16
    """None: as many as the context allows."""
    min_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    """None: drawn anew from the engine's seed for each request."""
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: none; k: of the sampled token and of the k likeliest."""
    prompt_logprobs: int | None = None
    """Likewise of the prompt's own tokens."""
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | None = None
    """Words that the output must not hold; needs the tokenizer."""
    allowed_token_ids: list[int] | None = None
    """None: all."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form that the output must have; needs the tokenizer."""
    truncate_prompt_tokens: int | None = None
    """Keep this many of the last tokens of a longer prompt; -1: as many as the model takes."""
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        """Check types and ranges."""
        check_integer("n", self.n, 1, MOST_CHOICES)
        if self.best_of is not None:
            check_integer("best_of", self.best_of, self.n, MOST_CHOICES)
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1, math.inf)
        check_integer(
            "min_tokens", self.min_tokens, 0, math.inf if self.max_tokens is None else self.max_tokens
        )
        check_number("temperature", self.temperature, 0, 100)
        check_number("top_p", self.top_p, 1e-9, 1)
        check_integer("top_k", self.top_k, -1, 2**31 - 1)
        check_number("min_p", self.min_p, 0, 1)
        check_number("presence_penalty", self.presence_penalty, -2, 2)
        check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        check_number("repetition_penalty", self.repetition_penalty, 1e-9, 100)
        if self.seed is not None:
            check_integer("seed", self.seed, -(2**63), 2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if (asked := getattr(self, name)) is not None:
                check_integer(name, asked, 0, 100)
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens != -1:
            check_integer("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, math.inf)
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            check_flag(name, getattr(self, name))
        if self.structured_outputs is not None and not isinstance(
            self.structured_outputs, StructuredOutputsParams
        ):
            raise InvalidRequest(
                f"structured_outputs is {self.structured_outputs!r}, it must be a StructuredOutputsParams",
                "structured_outputs",
            )
        self._check_token_ids()
        self._check_words()

    def _check_token_ids(self) -> None:
        for name in ("stop_token_ids", "allowed_token_ids"):
            given = getattr(self, name)
            if given is not None and not (_is_list(given) and all(is_integer(one) for one in given)):
                raise InvalidRequest(f"{name} is {given!r}, it must be a list of token ids", name)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids is empty: nothing could be sampled", "allowed_token_ids")
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest(
                f"logit_bias is {self.logit_bias!r}, it must be a dict of token ids: give {{5: -1.0}}",
                "logit_bias",
            )
        for token_id, bias in (self.logit_bias or {}).items():
            if type(token_id) is not int:
                raise InvalidRequest(
                    f"logit_bias has the key {token_id!r}, keys are token ids: give {{5: -1.0}}", "logit_bias"
                )
            if isinstance(bias, bool) or not isinstance(bias, Real) or not bias <= _MOST_BIAS:  # also for NaN
                raise InvalidRequest(
                    f"logit_bias of token {token_id} is {bias!r}, it must be a number, {_MOST_BIAS:g} at most",
                    "logit_bias",
                )

    def _check_words(self) -> None:
        words = [] if self.stop is None else [self.stop] if isinstance(self.stop, str) else self.stop
        for name, given in (("stop", words), ("bad_words", self.bad_words or [])):
            if not _is_list(given) or not all(isinstance(one, str) for one in given):
                raise InvalidRequest(f"{name} is {given!r}, it must be a list of texts", name)
            if any(not one for one in given):
                raise InvalidRequest(f"{name} holds an empty string: leave it out", name)
        if words and not self.detokenize:
            raise InvalidRequest(
                "stop is looked for in text, and detokenize is False: leave out one, or give stop_token_ids",
                "stop",
            )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids that the model does not have.

        Raises:
            InvalidRequest: it names the field, the id and the limit.
        """
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            wrong = next((i for i in getattr(self, name) or () if not 0 <= i < vocab_size), None)
            if wrong is not None:
                raise InvalidRequest(
                    f"{name}: token id {wrong} is outside the vocabulary of {vocab_size:,}", name
                )

    @property
    def num_choices(self) -> int:
        """Outputs that are computed."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_contest(self) -> bool:
        """True if more outputs are computed than given."""
        return self.num_choices > self.n

    @property
    def stop_strings(self) -> list[str]:
        """``stop`` as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    @property
    def needs_tokenizer(self) -> bool:
        """True if token ids alone do not say what is asked for."""
        return bool(self.stop_strings or self.bad_words or self.structured_outputs)

    def choice(
        self, choice_index: int, seed: int, max_tokens: int, bad_words: tuple[tuple[int, ...], ...] = ()
    ) -> ChoiceParams:
        """Parameters of one of the choices, for the engine.

        Args:
            seed: used where ``self.seed`` is None.
            max_tokens: what the context leaves.
            bad_words: ``self.bad_words`` as token ids.
        """
        # Numbers may be numpy's, which do not travel to ranks.
        return ChoiceParams(
            max_tokens=min(int(self.max_tokens or max_tokens), max_tokens),
            min_tokens=int(self.min_tokens),
            temperature=float(self.temperature),
            top_k=max(int(self.top_k), 0),
            top_p=float(self.top_p),
            min_p=float(self.min_p),
            repetition_penalty=float(self.repetition_penalty),
            presence_penalty=float(self.presence_penalty),
            frequency_penalty=float(self.frequency_penalty),
            logit_bias={token_id: float(bias) for token_id, bias in (self.logit_bias or {}).items()},
            seed=seed if self.seed is None else int(self.seed),
            choice_index=choice_index,
            stop_token_ids=tuple(map(int, self.stop_token_ids or ())),
            ignore_eos=self.ignore_eos,
            num_logprobs=self._num_logprobs,
            # All choices have one prompt: it is scored once.
            num_prompt_logprobs=self.prompt_logprobs if choice_index == 0 else None,
            grammar=self.structured_outputs.text if self.structured_outputs is not None else "",
            allowed_token_ids=tuple(map(int, self.allowed_token_ids or ())),
            bad_words=bad_words,
        )

    @property
    def _num_logprobs(self) -> int | None:
        """What ranks must tell: a contest is decided by the sampled tokens' own."""
        if self.logprobs is None:
            return 0 if self.is_contest else None
        return int(self.logprobs)


def _is_list(value: object) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)
