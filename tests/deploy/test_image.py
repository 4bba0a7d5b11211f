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
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())

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


def pip_options(folder: Path, finds_wheels_here: bool = True) -> list[str]:
    """How pip of this machine finds packages, handed to the build: variables, files and certificates.

    Args:
        folder: an empty one, for the certificate.
        finds_wheels_here: also those in a folder of this machine, where torch may be one for CPUs.
    """
    options = []
    folders = [os.environ.get("PIP_FIND_LINKS")] if finds_wheels_here else []
    for path in ("/etc/pip.conf", "/etc/xdg/pip", *filter(None, folders)):
        if os.path.exists(path):
            options += ["--volume", f"{path}:{path}:ro"]
    certificate = os.environ.get("PIP_CERT")
    if certificate:
        shutil.copy(certificate, folder / "ca.crt")
        options += ["--volume", f"{folder}:/opt/build-certificates:ro"]
    for name, value in os.environ.items():
        if name.startswith("PIP_") and (finds_wheels_here or name != "PIP_FIND_LINKS"):
            value = "/opt/build-certificates/ca.crt" if name == "PIP_CERT" else value
            options += ["--env", f"{name}={value}"]
    return options


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    """With the base of both targets, bootstrapped from Debian's packages."""
    folder = tmp_path_factory.mktemp("image")
    found = Buildah(folder / "store")
    rootfs = folder / "rootfs"
    mirror = "http://deb.debian.org/debian"
    subprocess.run(["debootstrap", "--variant=minbase", "bookworm", str(rootfs), mirror], check=True)
    subprocess.run(["tar", "-C", str(rootfs), "-cf", str(folder / "rootfs.tar"), "."], check=True)
    shutil.rmtree(rootfs)
    base = found.run("from", "scratch")
    found.run("add", "-q", base, str(folder / "rootfs.tar"), "/")
    found.run("commit", "-q", "--rm", base, "localhost/base")
    (folder / "rootfs.tar").unlink()
    yield found
    shutil.rmtree(folder, ignore_errors=True)


def build(buildah: Buildah, target: str, *options: str) -> str:
    """Build a target of the Dockerfile; the image's name."""
    name = f"localhost/shoal:{target}"
    buildah.run(
        *("bud", "--isolation", "chroot", "--layers=false", "--pull=never", "--target", target),
        *("-f", "deploy/Dockerfile", "--build-arg", "BASE=localhost/base"),
        *(*options, "-t", name, "."),
    )
    return name


@pytest.mark.skipif(shutil.disk_usage("/tmp").free < 45 << 30, reason="needs 45 GB")
def test_the_cuda_image_holds_torch_for_gpus_and_the_kernels_compiler(
    buildah: Buildah, tmp_path: Path
) -> None:
    """There need be no GPU to build it, nor here to look into it."""
    (tmp_path / "pip").mkdir()
    image = build(buildah, "cuda", *pip_options(tmp_path / "pip", finds_wheels_here=False))

    container = buildah.run("from", "--pull-never", image)
    run = ("run", "--isolation", "chroot", "--user", "1000:1000", container, "--")
    told = buildah.run(
        *run,
        *(
            "python",
            "-c",
            "import torch, triton; print(torch.__version__, torch.version.cuda, triton.__version__)",
        ),
    )
    version, cuda, compiler = told.split()

    assert version.split("+")[0] == PINS["torch"]
    assert cuda.startswith("13")
    assert compiler == PINS["triton"]
    assert "tensor-parallel-size" in buildah.run(*run, "shoal", "serve", "--help")


@pytest.mark.cluster
def test_the_cpu_image_serves_as_an_ordinary_user(
    buildah: Buildah, demo_model: ModelFiles, tmp_path: Path
) -> None:
    (tmp_path / "pip").mkdir()
    image = build(buildah, "cpu", "--build-arg", "TORCH_INDEX=", *pip_options(tmp_path / "pip"))
    (port,) = find_free_ports("127.0.0.1", 1, 23000)
    shutil.copy(demo_model.path, tmp_path / "model.gguf")
    tmp_path.chmod(0o755)
    limit = min(65536, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    container = buildah.run("from", "--pull-never", "--ulimit", f"nofile={limit}:{limit}", image)
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
    assert buildah.run(*run, "id", "-u") == "1000"
    assert buildah.run(*run, "sh", "-c", "touch /opt/shoal/x 2>/dev/null || echo refused") == "refused"

    flags = ("--port", str(port), "--replicas", "1", "--max-model-len", "1024", "--kv-cache-gib", "0.25")
    served = buildah.start(
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
