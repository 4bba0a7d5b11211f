"""The public face of Shoal: ``from shoal import LLM, SamplingParams``, or ``python -m shoal serve``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deploy.offline.llm import LLM
    from deploy.offline.outputs import (
        CompletionOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingRequestOutput,
        RequestOutput,
    )
    from deploy.offline.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
]

_HOMES = {
    "LLM": "deploy.offline.llm",
    "SamplingParams": "deploy.offline.sampling_params",
    "RequestOutput": "deploy.offline.outputs",
    "CompletionOutput": "deploy.offline.outputs",
    "EmbeddingRequestOutput": "deploy.offline.outputs",
    "PoolingRequestOutput": "deploy.offline.outputs",
    "Logprob": "deploy.offline.outputs",
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
