"""The image's CPU target, built without a container engine and served from (buildah in a chroot)."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deploy.runtime import find_free_ports
from deploy.smoke_test import complaint
from workers.checkpoint.source import ModelFiles

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("buildah", "debootstrap")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, TOOLS)),
        reason="needs root, and Debian's buildah and debootstrap",
    ),
]


class Buildah:
    """buildah with a store of its own."""

    def __init__(self, folder: Path) -> None:
        (folder / "work").mkdir(parents=True)
        self._environment = {**os.environ, "TMPDIR": str(folder / "work")}
        self._command = [
            "buildah",
            "--root",
            f"{folder}/root",
            "--runroot",
            f"{folder}/run",
            "--storage-driver",
            "vfs",
        ]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self._command, *arguments], env=self._environment, stderr=subprocess.PIPE, text=True
        )

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self._command, *arguments],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout.strip()


def pip_options(folder: Path) -> list[str]:
    """How pip of this machine finds packages, handed to the build: variables, files and certificates."""
    options = []
    for path in ("/etc/pip.conf", "/etc/xdg/pip", *filter(None, [os.environ.get("PIP_FIND_LINKS")])):
        if os.path.exists(path):
            options += ["--volume", f"{path}:{path}:ro"]
    certificate = os.environ.get("PIP_CERT")
    if certificate:
        shutil.copy(certificate, folder / "ca.crt")
        options += ["--volume", f"{folder}:/opt/build-certificates:ro"]
    for name, value in os.environ.items():
        if name.startswith("PIP_"):
            value = "/opt/build-certificates/ca.crt" if name == "PIP_CERT" else value
            options += ["--env", f"{name}={value}"]
    return options


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    folder = tmp_path_factory.mktemp("image")
    buildah = Buildah(folder / "store")
    rootfs = folder / "rootfs"
    mirror = "http://deb.debian.org/debian"
    subprocess.run(["debootstrap", "--variant=minbase", "bookworm", str(rootfs), mirror], check=True)
    subprocess.run(["tar", "-C", str(rootfs), "-cf", str(folder / "rootfs.tar"), "."], check=True)
    shutil.rmtree(rootfs)
    base = buildah.run("from", "scratch")
    buildah.run("add", "-q", base, str(folder / "rootfs.tar"), "/")
    buildah.run("commit", "-q", "--rm", base, "localhost/base")
    (folder / "pip").mkdir()
    buildah.run(
        *("bud", "--isolation", "chroot", "--layers=false", "--pull=never", "--target", "cpu"),
        *("-f", "deploy/Dockerfile", "--build-arg", "BASE=localhost/base", "--build-arg", "TORCH_INDEX="),
        *pip_options(folder / "pip"),
        *("-t", "localhost/shoal:cpu", "."),
    )
    yield buildah
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.cluster
def test_the_cpu_image_serves_as_an_ordinary_user(
    image: Buildah, demo_model: ModelFiles, tmp_path: Path
) -> None:
    (port,) = find_free_ports("127.0.0.1", 1, 23000)
    shutil.copy(demo_model.path, tmp_path / "model.gguf")
    tmp_path.chmod(0o755)
    limit = min(65536, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    container = image.run(
        "from", "--pull-never", "--ulimit", f"nofile={limit}:{limit}", "localhost/shoal:cpu"
    )
    run = (
        "run",
        "--isolation",
        "chroot",
        "--user",
        "1000:1000",
        "--volume",
        f"{tmp_path}:/model:ro",
        container,
        "--",
    )
    assert image.run(*run, "id", "-u") == "1000"
    assert image.run(*run, "sh", "-c", "touch /opt/shoal/x 2>/dev/null || echo refused") == "refused"

    flags = ("--port", str(port), "--replicas", "1", "--max-model-len", "1024", "--kv-cache-gib", "0.25")
    served = image.start(
        *run,
        "timeout",
        "-s",
        "INT",
        "200",
        "shoal",
        "serve",
        "/model/model.gguf",
        "--served-model-name",
        "demo",
        *flags,
    )
    try:
        assert served.stderr is not None
        told = []
        while not told or (told[-1] and "Shoal answers at" not in told[-1]):
            told.append(served.stderr.readline())
        assert told[-1], told
        assert complaint(f"http://127.0.0.1:{port}", ["demo"], None) is None
        for process in psutil.Process(served.pid).children(recursive=True):
            if process.cmdline()[1:3] == ["/opt/shoal/bin/shoal", "serve"]:
                process.send_signal(signal.SIGINT)  # Ctrl-C
        assert served.wait(60) == 0
    finally:
        if served.poll() is None:
            served.wait(260)  # the time-out inside ends it
