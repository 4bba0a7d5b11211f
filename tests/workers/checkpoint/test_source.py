"""Where models are looked for, and what is said when they are not there."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from workers.checkpoint import source as source_module
from workers.checkpoint.source import DEMO_MODEL, ModelSource, resolve_model
from workers.engine.errors import UnknownModel

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def offline(cache_dir: Path) -> ModelSource:
    return ModelSource(cache_dir, offline=True)


def write_model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "my-model")

    files = resolve_model(str(folder), offline(tmp_path))

    assert (files.path, files.name, files.is_gguf) == (folder, "my-model", False)


def test_a_gguf_file_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")

    files = resolve_model(str(tmp_path / "tiny.gguf"), offline(tmp_path))

    assert (files.name, files.is_gguf) == ("tiny", True)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("./nowhere", "no file or folder './nowhere'"),
        ("nowhere.gguf", "no file or folder 'nowhere.gguf'"),
        ("just-a-word", "neither a path nor a hub id"),
        ("some/model", "offline mode is on"),
        (None, "offline mode is on"),
    ],
)
def test_what_is_not_there_is_named_with_the_way_out(tmp_path: Path, model: str | None, says: str) -> None:
    with pytest.raises(UnknownModel, match=says):
        resolve_model(model, offline(tmp_path))


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"has no config\.json"):
        resolve_model(str(tmp_path), offline(tmp_path))


def test_a_pickled_checkpoint_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")

    with pytest.raises(UnknownModel, match=r"must be a \.gguf file"):
        resolve_model(str(tmp_path / "pytorch_model.bin"), offline(tmp_path))


def test_the_demo_model_is_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = tmp_path / "models" / source_module._DEMO_FILE
    cached.parent.mkdir()
    cached.write_bytes(b"GGUF")
    monkeypatch.setattr(source_module, "_DEMO_BYTES", 4)

    for name in (None, "smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"):
        assert resolve_model(name, offline(tmp_path)).path == cached


def test_a_cut_off_demo_file_is_not_served(tmp_path: Path) -> None:
    cached = tmp_path / "models" / source_module._DEMO_FILE
    cached.parent.mkdir()
    cached.write_bytes(b"GGUF")

    with pytest.raises(UnknownModel):
        resolve_model(None, offline(tmp_path))


class Hub(BaseHTTPRequestHandler):
    """As much of the Hugging Face hub's HTTP API as a snapshot download asks for."""

    files = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights"}  # noqa: RUF012

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        if self.path.startswith(f"/api/models/{source_module._DEMO_HUB_ID}"):
            siblings = [{"rfilename": name} for name in self.files]
            body = json.dumps(
                {"id": source_module._DEMO_HUB_ID, "sha": COMMIT, "siblings": siblings}
            ).encode()
            if "/tree/" in self.path:
                body = json.dumps(
                    [
                        {
                            "type": "file",
                            "path": name,
                            "size": len(data),
                            "oid": hashlib.sha1(data).hexdigest(),
                        }
                        for name, data in self.files.items()
                    ]
                ).encode()
            self._send(200, body, with_body, {"Content-Type": "application/json"})
            return
        name = self.path.rsplit("/", 1)[-1]
        if source_module._DEMO_HUB_ID in self.path and name in self.files:
            etag = hashlib.sha256(self.files[name]).hexdigest()
            self._send(200, self.files[name], with_body, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
            return
        self._send(404, b"{}", with_body, {"X-Error-Code": "RepoNotFound"})

    def _send(self, status: int, body: bytes, with_body: bool, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelSource]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield ModelSource(
        tmp_path / "cache", hub_endpoint=f"http://127.0.0.1:{server.server_port}", use_package_index=False
    )
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_demo_model_comes_from_the_hub_where_the_package_index_has_none(hub: ModelSource) -> None:
    said: list[str] = []

    files = resolve_model(None, hub, said.append)

    assert files.name == DEMO_MODEL
    assert (files.path / "model.safetensors").read_bytes() == b"weights"
    assert any(str(hub.hub_endpoint) in line for line in said)


def test_a_model_that_the_hub_does_not_have_is_named(hub: ModelSource) -> None:
    with pytest.raises(UnknownModel, match="has no model 'no/such'"):
        resolve_model("no/such", hub)


def test_a_hub_that_cannot_be_reached_is_said_so(tmp_path: Path) -> None:
    nowhere = ModelSource(tmp_path, hub_endpoint="http://127.0.0.1:9", use_package_index=False)

    with pytest.raises(UnknownModel, match=r"127\.0\.0\.1:9"):
        resolve_model("some/model", nowhere)
