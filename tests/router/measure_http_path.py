"""Measures the HTTP path by itself: client, [HAProxy,] one ingress, one scripted replica; no model runs.

    .venv/bin/python tests/router/measure_http_path.py --streams 32 --tokens 200 [--haproxy PATH]

Prints tokens per second, CPU per token of each process, and time to first token at one stream. All
processes share this machine's cores, the client included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import uvloop
from platformdirs import user_cache_dir

MODEL = "measured"

HAPROXY = """
global
    maxconn 4096
defaults
    mode http
    timeout connect 5s
    timeout client 300s
    timeout server 300s
frontend edge
    bind 127.0.0.1:{port}
    default_backend ingress
backend ingress
    server one 127.0.0.1:{ingress_port}
"""


def serve_ingress(port: int, replica: str) -> None:
    """Run one ingress under uvicorn; a process of its own."""
    import uvicorn

    from router.app import build_app
    from router.config import IngressConfig, ServedModelConfig
    from router.ingress import Ingress
    from router.membership import StaticMembership
    from workers.checkpoint.source import ModelFiles

    path = Path(user_cache_dir("shoal")) / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    ingress = Ingress(IngressConfig((ServedModelConfig(ModelFiles(path, MODEL), 8192),)))
    app = build_app(ingress, StaticMembership({"one": replica}))
    uvicorn.run(app, host="127.0.0.1", port=port, access_log=False, log_level="warning")


def request_bytes(num_tokens: int, *, is_stream: bool = True) -> bytes:
    """A chat request as raw HTTP/1.1."""
    body = json.dumps(
        {
            "model": MODEL,
            "stream": is_stream,
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "messages": [{"role": "user", "content": "Tell me about the shoals of the North Sea."}],
        }
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def stream(port: int, num_tokens: int) -> tuple[int, float]:
    """One streamed request: chunks with text, and seconds to the first."""
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_bytes(num_tokens))
    num_chunks, first_s, tail = 0, 0.0, b""
    while True:
        data = await reader.read(65536)
        if not data:
            raise RuntimeError(f"connection closed: {tail[-200:]!r}")
        if not num_chunks:
            first_s = time.perf_counter() - start
        num_chunks += data.count(b'{"content":')
        tail = (tail + data)[-300:]
        if b"data: [DONE]" in tail:
            break
    writer.close()
    return num_chunks, first_s


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds used so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


async def wait_ready(port: int) -> None:
    """Until the ingress has a replica."""
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            if b" 200 " in (await reader.read())[:20]:
                return
        except OSError:
            pass
        await asyncio.sleep(0.1)


async def measure(arguments: argparse.Namespace, port: int, processes: dict[str, psutil.Process]) -> None:
    """Warm up, then measure."""
    await wait_ready(port)
    await asyncio.gather(*(stream(port, 50) for _ in range(arguments.streams)))
    firsts = [(await stream(port, 1))[1] for _ in range(100)]
    print(
        f"first token, one stream: p50 {statistics.median(firsts) * 1e3:.2f} ms, max {max(firsts) * 1e3:.2f} ms"
    )
    for _ in range(arguments.repeat):
        before = {name: cpu_s(process) for name, process in processes.items()}
        start = time.perf_counter()
        found = await asyncio.gather(*(stream(port, arguments.tokens) for _ in range(arguments.streams)))
        elapsed_s = time.perf_counter() - start
        num_tokens = arguments.streams * arguments.tokens
        num_chunks = sum(chunks for chunks, _ in found)
        used = ", ".join(
            f"{name} {(cpu_s(process) - before[name]) / num_tokens * 1e6:.1f}"
            for name, process in processes.items()
        )
        print(
            f"{num_tokens / elapsed_s:,.0f} tok/s, {num_chunks / num_tokens:.3f} chunks/token, CPU us/token: {used}"
        )


def main() -> None:
    """Start the processes, measure, end them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--port", type=int, default=18230)
    parser.add_argument("--haproxy", help="path of an haproxy binary to put in front")
    parser.add_argument("--ingress-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ingress_of:
        serve_ingress(arguments.port, arguments.ingress_of)
        return
    started: dict[str, subprocess.Popen[str]] = {}
    try:
        started["replica"] = subprocess.Popen(
            [sys.executable, "-m", "router.scripted_replica"], stdout=subprocess.PIPE, text=True
        )
        replica_output = started["replica"].stdout
        assert replica_output is not None
        address = replica_output.readline().strip()
        started["ingress"] = subprocess.Popen(
            [sys.executable, __file__, "--port", str(arguments.port), "--ingress-of", address], text=True
        )
        port = arguments.port
        with tempfile.NamedTemporaryFile("w", suffix=".cfg") as config:
            if arguments.haproxy:
                port += 1
                config.write(HAPROXY.format(port=port, ingress_port=arguments.port))
                config.flush()
                started["haproxy"] = subprocess.Popen(
                    [arguments.haproxy, "-db", "-f", config.name], text=True
                )
            processes = {name: psutil.Process(process.pid) for name, process in started.items()}
            processes["client"] = psutil.Process()
            uvloop.run(measure(arguments, port, processes))
    finally:
        for process in started.values():
            process.terminate()
        for process in started.values():
            process.wait()


if __name__ == "__main__":
    main()
