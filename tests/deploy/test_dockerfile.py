"""The Dockerfile says what the rest of the repository says: pins, packages, versions, one runtime for both targets."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINS = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if re.match(r"\w", line)
)


@dataclass
class Stage:
    """A stage of the file: what it is built on, and its instructions in order."""

    base: str
    lines: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [rest for name, rest in self.lines if name == instruction]


def instructions() -> Iterator[tuple[str, str]]:
    text = (ROOT / "deploy/Dockerfile").read_text()
    code = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for line in re.sub(r"\\\n\s*", "", code).splitlines():
        if line.strip():
            name, rest = line.split(" ", 1)
            yield name, rest


def stages() -> dict[str, Stage]:
    found: dict[str, Stage] = {}
    current = Stage("")
    for name, rest in instructions():
        if name == "FROM":
            base, _, title = rest.split(" ")
            current = found[title] = Stage(base)
        else:
            current.lines.append((name, rest))
    return found


STAGES = stages()


def lineage(target: str) -> list[str]:
    """The target and what it is built on, last first."""
    found = [target]
    while STAGES[found[-1]].base in STAGES:
        found.append(STAGES[found[-1]].base)
    return found


def test_every_stage_that_is_named_is_there() -> None:
    for stage in STAGES.values():
        assert stage.base in {*STAGES, "${BASE}"}
        for copy in stage.all("COPY"):
            source = re.match(r"--from=(\S+) ", copy)
            assert source is None or source[1] in STAGES


def test_what_is_copied_exists_and_is_all_that_the_package_needs() -> None:
    copied = [
        word
        for stage in STAGES.values()
        for copy in stage.all("COPY")
        if not copy.startswith("--from")
        for word in copy.split()[:-1]
    ]
    setuptools = PROJECT["tool"]["setuptools"]
    folders = [one.removesuffix("*") for one in setuptools["packages"]["find"]["include"]]
    needed = {
        *folders,
        *(f"{one}.py" for one in setuptools["py-modules"]),
        "pyproject.toml",
        "constraints.txt",
    }
    needed |= {PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]}
    ignored = (ROOT / ".dockerignore").read_text().split()

    assert set(copied) == needed
    assert [word for word in copied if not (ROOT / word).exists()] == []
    assert [word for word in copied if any(fnmatch(word, pattern) for pattern in ignored)] == []


def test_pins_are_those_of_the_constraints() -> None:
    text = (ROOT / "deploy/Dockerfile").read_text()

    assert re.findall(r'"torch==([\d.]+)\+cpu"', text) == [PINS["torch"]]
    for target in ("install-cpu", "install-cuda"):
        (command,) = STAGES[target].all("RUN")
        assert "-c constraints.txt" in command
        assert '".[tracing]"' in command


def test_versions_are_the_packages() -> None:
    version = PROJECT["project"]["version"]
    chart = yaml.safe_load((ROOT / "helm/Chart.yaml").read_text())
    labels = " ".join(STAGES["runtime"].all("LABEL"))

    assert f"org.opencontainers.image.version={version}" in labels
    assert chart["appVersion"] == version
    values = yaml.safe_load((ROOT / "helm/values.yaml").read_text())
    assert values["ray"]["version"] == PINS["ray"]


def test_the_base_is_a_release_of_one_day() -> None:
    (base,) = [rest for name, rest in instructions() if name == "ARG" and rest.startswith("BASE=")]

    assert re.fullmatch(r"BASE=docker\.io/library/debian:\w+-\d{8}-slim", base)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_both_targets_run_as_the_charts_user_with_the_same_command(target: str) -> None:
    stage = STAGES[target]
    values = yaml.safe_load((ROOT / "helm/values.yaml").read_text())
    user = values["podSecurityContext"]["runAsUser"]
    (made,) = [run for run in STAGES["runtime"].all("RUN") if "useradd" in run]

    assert lineage(target) == [target, "runtime", "system"]
    assert stage.all("COPY") == [f"--from=install-{target} /opt/shoal /opt/shoal"]
    assert stage.all("USER") == [f"{user}:{user}"]
    assert f"--uid {user} " in made
    assert json.loads(stage.all("CMD")[0]) == ["shoal", "serve", "--host", "0.0.0.0"]
