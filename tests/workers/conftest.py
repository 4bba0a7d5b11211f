"""Fixtures of the engine's tests: the demo model's vocabulary, read once."""

from __future__ import annotations

import pytest

from workers.checkpoint.source import ModelFiles
from workers.checkpoint.vocabulary import Vocabulary, load_vocabulary


@pytest.fixture(scope="session")
def demo_vocabulary(demo_model: ModelFiles) -> Vocabulary:
    """49,152 tokens."""
    return load_vocabulary(demo_model)
