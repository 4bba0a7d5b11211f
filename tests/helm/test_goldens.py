"""What the examples render, document by document, as it was when somebody last looked at it.

A change here is a change of what users' clusters run: look at the difference, then write the goldens anew with
``SHOAL_WRITE_GOLDENS=1 pytest tests/helm/test_goldens.py``. Compared as parsed YAML: both Helms must agree.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

if TYPE_CHECKING:
    from conftest import Helm

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "helm/ci").glob("*-values.yaml"))
GOLDENS = Path(__file__).with_name("goldens")
_LONG = 4000
"""Texts beyond it (dashboards) stand in the goldens by their digest: they are looked at in their own files."""


def shortened(value: Any) -> Any:
    """The same with long texts replaced, and Serve's configuration as what it means."""
    if isinstance(value, dict):
        return {
            key: yaml.safe_load(one) if key == "serveConfigV2" else shortened(one)
            for key, one in value.items()
        }
    if isinstance(value, list):
        return [shortened(one) for one in value]
    if isinstance(value, str) and len(value) > _LONG:
        return f"sha256:{hashlib.sha256(value.encode()).hexdigest()}"
    return value


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem.removesuffix("-values"))
def test_an_example_renders_what_it_did(helm: Helm, example: Path) -> None:
    documents = [shortened(one) for one in helm.render("-f", str(example))]
    documents.sort(key=lambda one: (one["kind"], one["metadata"]["name"]))
    path = GOLDENS / example.name.replace("-values", "")
    if os.environ.get("SHOAL_WRITE_GOLDENS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump_all(documents, sort_keys=True, width=120))

    assert documents == list(yaml.safe_load_all(path.read_text()))
