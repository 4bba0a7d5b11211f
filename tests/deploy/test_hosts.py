"""Hosts of one's own, as the handbook sets them up: network namespaces of this machine, a raylet in each.

They join with Ray's token, lose the network, are killed, are drained; streams go on. Each test leaves all hosts well.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
INGRESS = "ServeReplica:shoal-ingress"
BRIDGE, NETWORK = "shoal-lab", "10.213.77"
KEYS = {"first": "sk-first-0123456789", "second": "sk-second-0123456789"}
FAST_HEALTH = {
    f"RAY_health_check_{name}": value
    for name, value in {
        "initial_delay_ms": "1000",
        "period_ms": "500",
        "timeout_ms": "1000",
        "failure_threshold": "4",
    }.items()
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None,
        reason="needs root and iproute2 for network namespaces",
    ),
]


def ip(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
    return done.stdout


class Host:
    """A network namespace with an address, a folder for temporary files, and what runs in it."""

    def __init__(self, name: str, number: int, folder: Path, token: str) -> None:
        self.name, self.link = f"shoal-lab-{name}", f"shoal-lab-{number}"
        self.address = f"{NETWORK}.{number}"
        self.url = f"http://{self.address}:8000"
        self.folder = folder / name
        self.folder.mkdir()
        ip("netns", "add", self.name)
        ip("link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        ip("link", "set", self.link, "master", BRIDGE, "up")
        inside = ("-n", self.name)
        ip(*inside, "address", "add", f"{self.address}/24", "dev", "eth0")
        ip(*inside, "link", "set", "lo", "up")
        ip(*inside, "link", "set", "eth0", "up")
        ip(*inside, "route", "add", "default", "via", f"{NETWORK}.1")
        files = {
            "CONFIG_FILE_LOC": "haproxy.cfg",
            "SOCKET_PATH": "admin.sock",
            "METRICS_SOCKET_PATH": "metrics.sock",
            "SERVER_STATE_BASE": "",
            "SERVER_STATE_FILE": "server-state",
        }  # one file system for all hosts
        self.environment = {
            **os.environ,
            **FAST_HEALTH,
            **{f"RAY_SERVE_HAPROXY_{key}": str(self.folder / value) for key, value in files.items()},
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(self.folder),
            "RAY_ADDRESS": f"{NETWORK}.2:6379",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": token,
            "SHOAL_HOST": "0.0.0.0",
            "SHOAL_METRICS_PORT": "9400",
        }

    def start(self, command: str, **environment: str) -> subprocess.Popen[str]:
        """Run a shell's line in it, prepared as the handbook says."""
        line = f'eval "$({sys.executable} -m deploy.node_environment)"; {command}'
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, "bash", "-c", line],
            env={**self.environment, **environment},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command: str, timeout_s: float = 120.0, **environment: str) -> tuple[int, str]:
        """Exit code and output."""
        process = self.start(command, **environment)
        # The daemons of Ray keep the pipe: wait for the shell, not for its end.
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        return code, process.stdout.read() or ""

    def join(self, num_cpus: int = 1) -> None:
        """Start a raylet as a worker of the head."""
        code, output = self.run(
            f"ray start --address={NETWORK}.2:6379 --node-ip-address={self.address} --num-cpus={num_cpus} "
            f"--temp-dir={self.folder}/ray --object-store-memory=134217728"
        )
        assert code == 0, output

    def processes(self, word: str = "") -> list[psutil.Process]:
        """What runs in it, with ``word`` in its title."""
        found = []
        for pid in map(int, ip("netns", "pids", self.name).split()):
            try:
                process = psutil.Process(pid)
                if word in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue  # it has just ended
        return found

    def kill(self) -> None:
        """The host is gone: SIGKILL for everything, again and again until nothing is left."""
        while left := self.processes():
            for process in left:
                if process.is_running():
                    process.kill()
            psutil.wait_procs(left, timeout=5)

    def remove(self) -> None:
        self.kill()
        ip("netns", "delete", self.name, check=False)


class Lab:
    """A head and three hosts for replicas, one each, and one ingress; two replicas are wanted."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="shoal-lab-", dir="/tmp"))  # HAProxy's paths must be short
        self.token = os.urandom(32).hex()
        self.keys = self.folder / "keys.yaml"
        self.write_keys("first", "second")
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("address", "add", f"{NETWORK}.1/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        self.head, *self.hosts = [
            Host(name, number, self.folder, self.token) for number, name in enumerate(("h", "a", "b", "c"), 2)
        ]
        code, output = self.head.run(
            f"ray start --head --dashboard-host=127.0.0.1 --node-ip-address={self.head.address} --num-cpus=0 "
            f"--temp-dir={self.head.folder}/ray --object-store-memory=134217728"
        )
        assert code == 0, output

    def write_keys(self, *names: str) -> None:
        partial = self.keys.with_suffix(".new")
        entries = [{"name": name, "key": KEYS[name], "admin": name == "second"} for name in names]
        partial.write_text(yaml.safe_dump({"keys": entries}))
        partial.rename(self.keys)  # as Kubernetes does it: a reader sees the old keys or the new ones

    def deploy(self) -> None:
        engine = {"scripted": True, "scripted_step_s": 0.05, "max_model_len": 4096, "drain_timeout_s": 60}
        config = {
            "models": [{"name": "m", "device": "cpu", "replicas": 2, "ranks_per_node": 1, "engine": engine}],
            "ingress": {
                "replicas": 1, "num_cpus": 0, "drain_timeout_s": 60, "stall_timeout_s": 8, "replica_wait_s": 60,
                "api_keys_file": str(self.keys), "grpc_port": 9000,
            },
            "http": {"port": 8000},
        }  # fmt: skip
        path = self.folder / "cluster.yaml"
        path.write_text(yaml.safe_dump(config))
        code, output = self.head.run(f"shoal deploy {path} --wait-s 120", timeout_s=180)
        assert code == 0, output

    def front(self) -> Host:
        """The host with the ingress. It may be started on the head, too, which no test may lose: then it is moved."""
        while not (found := [host for host in self.hosts if host.processes(INGRESS)]):
            for process in self.head.processes(INGRESS):
                process.kill()
            wait_for(lambda: not self.head.processes(INGRESS), 10, "the end of the ingress on the head")
            wait_for(lambda: self.num_open() == 2, 60, "an ingress that sees both replicas")
        return found[0]

    def num_open(self) -> int:
        """Replicas that the ingress can place requests on; 0 while there is no ingress."""
        for host in (self.head, *self.hosts):
            if host.processes(INGRESS):
                try:
                    models = httpx.get(f"{host.url}/health", timeout=5).json()["models"]
                    return int(models["m"]["num_open_replicas"])
                except (httpx.HTTPError, ValueError, KeyError):
                    continue
        return 0

    def remove(self) -> None:
        for host in (*self.hosts, self.head):
            host.remove()
        ip("link", "delete", BRIDGE, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    found = Lab()
    try:
        for host in found.hosts:
            host.join()
        found.deploy()
        wait_for(lambda: found.num_open() == 2, 60, "two replicas")
        yield found
    finally:
        found.remove()


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Seconds until it held."""
    started_s = time.monotonic()
    while not condition():
        assert time.monotonic() - started_s < timeout_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.2)
    return time.monotonic() - started_s


class Streams:
    """Streams of known length that run side by side through one host's HAProxy."""

    def __init__(self, host: Host, key: str, count: int = 8, num_tokens: int = 300) -> None:
        self._url, self._headers = f"{host.url}/v1/completions", {"Authorization": f"Bearer {KEYS[key]}"}
        self._num_tokens = num_tokens
        self._events: list[list[str]] = [[] for _ in range(count)]
        self._threads = [threading.Thread(target=self._read, args=(events,)) for events in self._events]
        for thread in self._threads:
            thread.start()
        wait_for(lambda: all(len(events) > 5 for events in self._events), 60, "streams that run")

    def _read(self, events: list[str]) -> None:
        body = {
            "model": "m", "prompt": [5, 6, 7], "max_tokens": self._num_tokens, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        with httpx.stream("POST", self._url, json=body, headers=self._headers, timeout=120) as answer:
            events += [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]

    def have_ended(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)

    def all_ended(self) -> bool:
        """Wait for them; True if each came to its proper end with every token counted."""
        for thread in self._threads:
            thread.join(120)
        return all(
            len(events) > 2
            and events[-1] == "[DONE]"
            and json.loads(events[-2])["usage"]["completion_tokens"] == self._num_tokens
            for events in self._events
        )


def wait_until_whole_again(lab: Lab) -> tuple[float, float]:
    """Seconds until the ingress missed a replica, and from then until there were two again."""
    lost_s = wait_for(lambda: lab.num_open() < 2, 60, "a lost replica that is missed")
    return lost_s, wait_for(lambda: lab.num_open() == 2, 120, "two replicas without the lost host")


def ask(host: Host, key: str) -> int:
    body: dict[str, Any] = {"model": "m", "prompt": "Hello", "max_tokens": 2}
    headers = {"Authorization": f"Bearer {KEYS[key]}"}
    return httpx.post(f"{host.url}/v1/completions", json=body, headers=headers, timeout=60).status_code


def test_a_host_with_the_wrong_token_is_kept_out(lab: Lab) -> None:
    stranger = Host("x", 9, lab.folder, "0" * 64)
    try:
        code, output = stranger.run(
            f"ray start --address={NETWORK}.2:6379 --node-ip-address={stranger.address} --num-cpus=1 "
            f"--temp-dir={stranger.folder}/ray",
            timeout_s=90,
        )
        assert code != 0
        assert "token" in output.lower()
        nodes = lab.head.run("ray list nodes --format json")[1]
        assert stranger.address not in nodes
    finally:
        stranger.remove()


def test_keys_change_while_streams_run_and_only_the_revoked_one_is_refused(lab: Lab) -> None:
    host = lab.front()
    streams = Streams(host, "first", num_tokens=200), Streams(host, "second", num_tokens=200)

    lab.write_keys("second")

    waited_s = wait_for(lambda: ask(host, "first") == 401, 10, "a refusal")
    assert ask(host, "second") == 200
    assert all(one.all_ended() for one in streams)  # what was let in stays in
    lab.write_keys("first", "second")
    wait_for(lambda: ask(host, "first") == 200, 10, "the key's return")
    print(f"refused {waited_s:.1f} s after the file changed")


def test_the_pods_hook_empties_a_host_under_load_and_no_stream_is_lost(lab: Lab) -> None:
    host = lab.front()
    streams = Streams(host, "first")

    started_s = time.monotonic()
    code, output = host.run("python -m deploy.drain_node --timeout-s 90 --settle-s 5", timeout_s=120)
    took_s = time.monotonic() - started_s
    assert streams.have_ended()
    host.kill()  # as the kubelet does when the hook has ended

    assert code == 0
    assert "no request passes here any more" in output, output
    assert streams.all_ended()
    print(f"empty after {took_s:.1f} s;", end=" ")
    print(f"whole again after {wait_for(lambda: lab.num_open() == 2, 90, 'two replicas'):.1f} s")
    host.join()


def test_streams_outlive_a_host_that_is_cut_off_and_it_comes_back(lab: Lab) -> None:
    front = lab.front()
    victim = next(host for host in lab.hosts if host is not front and host.processes("ServeReplica:model"))
    streams = Streams(front, "first", num_tokens=600)

    ip("link", "set", victim.link, "down")
    try:
        lost_s, healed_s = wait_until_whole_again(lab)
        assert streams.all_ended()
    finally:
        ip("link", "set", victim.link, "up")
    assert Streams(front, "second", count=4, num_tokens=20).all_ended()
    print(f"lost {lost_s:.1f} s after the cut, two replicas again {healed_s:.1f} s after that")

    # Ray has given the host up for good: it joins anew, as after a restart.
    victim.kill()
    victim.join()
    assert lab.num_open() == 2


def test_streams_outlive_a_host_that_is_killed(lab: Lab) -> None:
    front = lab.front()
    victim = next(host for host in lab.hosts if host is not front and host.processes("ServeReplica:model"))
    streams = Streams(front, "first", num_tokens=400)

    victim.kill()

    lost_s, healed_s = wait_until_whole_again(lab)
    assert streams.all_ended()
    print(f"lost {lost_s:.1f} s after the kill, two replicas again {healed_s:.1f} s after that")
    victim.join()
