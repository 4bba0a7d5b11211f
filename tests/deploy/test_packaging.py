"""What the repository promises about itself."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_transformers_models_import_beside_our_kernels() -> None:
    """transformers probes for a package called ``kernels``; ours must not be taken for Hugging Face's."""
    code = "import kernels, transformers; transformers.LlamaForCausalLM; transformers.Qwen3ForCausalLM"

    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_our_version_stays_below_what_transformers_takes_for_hugging_faces_kernels() -> None:
    assert tuple(int(part) for part in metadata.version("shoal").split(".")[:2]) < (0, 9)


def test_the_grpc_code_is_what_the_proto_file_generates(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    subprocess.run(
        [
            sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}",
            f"--grpc_python_out={tmp_path}", "cluster/proto/shoal.proto",
        ],
        check=True,
        cwd=ROOT,
    )  # fmt: skip

    for name in ("shoal_pb2.py", "shoal_pb2_grpc.py", "shoal_pb2.pyi"):
        generated = (tmp_path / "cluster/proto" / name).read_text()
        assert generated == (ROOT / "cluster/proto" / name).read_text(), f"{name} is stale: run make proto"


def test_every_dependency_says_why_it_is_there() -> None:
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    start = lines.index("dependencies = [")
    listed = lines[start + 1 : lines.index("]", start)]

    assert [line.strip() for line in listed if not re.search(r"#\s*\S+ \S+", line)] == []


def test_pins_lie_within_the_ranges_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())

    assert {"torch", "triton", "ray", "numpy"} <= set(pins)
    ranges = " ".join(project["dependencies"])
    for name in ("torch", "triton", "ray"):
        assert name in ranges


@pytest.mark.parametrize("command", ["serve", "chat", "generate", "bench"])
def test_commands_explain_themselves_without_loading_a_model(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "shoal", command, "--help"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )

    assert "Usage" in done.stdout
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "ray", "transformers"}


def test_python_m_shoal_names_an_unknown_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "swim"], capture_output=True, text=True, check=False, cwd=ROOT
    )

    assert done.returncode != 0
    assert "swim" in done.stderr
