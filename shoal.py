"""The public face of Shoal: ``from shoal import LLM, SamplingParams``, or ``python -m shoal serve``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deploy.offline.beam_search import BeamSearchParams
    from deploy.offline.failures import PromptsFailed
    from deploy.offline.llm import LLM
    from deploy.offline.outputs import (
        BeamSearchOutput,
        CompletionOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingRequestOutput,
        RequestOutput,
    )
    from deploy.offline.sampling_params import SamplingParams
    from deploy.offline.structured import StructuredOutputsParams

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "PoolingRequestOutput",
    "PromptsFailed",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]

_HOMES = {
    "LLM": "deploy.offline.llm",
    "BeamSearchParams": "deploy.offline.beam_search",
    "BeamSearchOutput": "deploy.offline.outputs",
    "StructuredOutputsParams": "deploy.offline.structured",
    "SamplingParams": "deploy.offline.sampling_params",
    "RequestOutput": "deploy.offline.outputs",
    "CompletionOutput": "deploy.offline.outputs",
    "EmbeddingRequestOutput": "deploy.offline.outputs",
    "PoolingRequestOutput": "deploy.offline.outputs",
    "Logprob": "deploy.offline.outputs",
    "PromptsFailed": "deploy.offline.failures",
}


def __getattr__(name: str) -> Any:
    """Import on first use: the command line must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


if __name__ == "__main__":
    from deploy.cli import main

    main()
