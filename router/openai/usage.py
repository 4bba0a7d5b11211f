"""Token counts of an answer."""

from __future__ import annotations

from typing import Any

from router.generation import Generation


def usage_object(generation: Generation) -> dict[str, Any]:
    """OpenAI's ``usage``: a prompt counts once for all its choices; tokens past a stop string do not count."""
    num_prompt, num_output = generation.num_prompt_tokens, generation.num_output_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
    }
