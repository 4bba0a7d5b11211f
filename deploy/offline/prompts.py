"""The forms in which offline callers give prompts and sampling parameters, and the tokenizer for their text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from deploy.offline.sampling_params import SamplingParams
from deploy.preflight import text_files
from deploy.served_model import template_of
from deploy.settings import ServeSettings
from router.text.tokenizer import Tokenizer
from workers.checkpoint.source import ModelFiles
from workers.checkpoint.vocabulary import load_vocabulary
from workers.engine.errors import InvalidRequest

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``."""


def load_tokenizer(settings: ServeSettings, files: ModelFiles) -> Tokenizer:
    """The tokenizer that the settings name, with their chat template."""
    vocabulary = load_vocabulary(text_files(settings, files))
    template = template_of(settings)
    return Tokenizer(vocabulary if template is None else replace(vocabulary, chat_template=template))


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def params_for(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """One for each prompt.

    Raises:
        InvalidRequest: several are given, and not as many as there are prompts.
    """
    if sampling_params is None:
        sampling_params = SamplingParams()
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    if len(sampling_params) != num_prompts:
        raise InvalidRequest(
            f"{len(sampling_params)} sampling_params for {num_prompts} prompts: give one, or one for each",
            "sampling_params",
        )
    return list(sampling_params)
