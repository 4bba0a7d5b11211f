"""How offline callers say what to sample; argument names are those of vLLM's ``SamplingParams``."""

from __future__ import annotations

import math
from dataclasses import dataclass

from deploy.offline.structured import StructuredOutputsParams
from workers.engine.errors import InvalidRequest
from workers.engine.request import ChoiceParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of one prompt.

    Raises:
        InvalidRequest: a value is out of range; it names the field, the value and the range.
    """

    n: int = 1
    """Outputs of the prompt."""
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
        """Check ranges."""
        self._check("n", self.n, 1, 16384)
        if self.max_tokens is not None:
            self._check("max_tokens", self.max_tokens, 1, math.inf)
            self._check("min_tokens", self.min_tokens, 0, self.max_tokens)
        self._check("temperature", self.temperature, 0, 100)
        self._check("top_p", self.top_p, 1e-9, 1)
        self._check("top_k", self.top_k, -1, 2**31 - 1)
        self._check("min_p", self.min_p, 0, 1)
        self._check("presence_penalty", self.presence_penalty, -2, 2)
        self._check("frequency_penalty", self.frequency_penalty, -2, 2)
        self._check("repetition_penalty", self.repetition_penalty, 1e-9, 100)
        for name in ("logprobs", "prompt_logprobs"):
            if (asked := getattr(self, name)) is not None:
                self._check(name, asked, 0, 100)
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens != -1:
            self._check("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, math.inf)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids is empty: nothing could be sampled", "allowed_token_ids")
        for token_id, bias in (self.logit_bias or {}).items():
            if type(token_id) is not int:
                raise InvalidRequest(
                    f"logit_bias has the key {token_id!r}, keys are token ids: give {{5: -1.0}}", "logit_bias"
                )
            if not bias < math.inf:  # also for NaN
                raise InvalidRequest(
                    f"logit_bias of token {token_id} is {bias}, it must be a number", "logit_bias"
                )
        if any(not stop for stop in self.stop_strings):
            raise InvalidRequest("stop holds an empty string, which matches everywhere: leave it out", "stop")

    @staticmethod
    def _check(name: str, value: float, low: float, high: float) -> None:
        if not low <= value <= high:  # also false for NaN
            raise InvalidRequest(f"{name} is {value}, it must be from {low} to {high}", name)

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
        """Parameters of one of the ``n`` choices, for the engine.

        Args:
            seed: used where ``self.seed`` is None.
            max_tokens: what the context leaves.
            bad_words: ``self.bad_words`` as token ids.
        """
        return ChoiceParams(
            max_tokens=min(self.max_tokens or max_tokens, max_tokens),
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias or {},
            seed=self.seed if self.seed is not None else seed,
            choice_index=choice_index,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            num_logprobs=self.logprobs,
            # All choices have one prompt: it is scored once.
            num_prompt_logprobs=self.prompt_logprobs if choice_index == 0 else None,
            grammar=self.structured_outputs.text if self.structured_outputs is not None else "",
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            bad_words=bad_words,
        )
