"""The HTTP API before a scripted replica, on a port of its own: for clients that run in other processes.

``python tests/router/edge_server.py`` prints its URL and serves until its input ends. The replica says its line to
everybody; the vocabulary is single bytes, the model's name is ``tiny``.
"""

from __future__ import annotations

import asyncio
import random
import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn
from conftest import END, make_byte_vocabulary, says
from engine_replica import EngineReplica

from router.app import build_app
from router.config import IngressConfig, ServedModelConfig, Timeouts
from router.ingress import Ingress
from router.membership import StaticMembership
from router.scripted_replica import ScriptedReplica
from workers.checkpoint.source import ModelFiles

LINE = "All is well."


async def serve(replica: ScriptedReplica | EngineReplica, **served: Any) -> None:
    """Serve until standard input ends; ``served`` are further settings of the model."""
    await replica.start()
    model = ServedModelConfig(ModelFiles(Path("tiny.gguf"), "tiny"), 4096, ("tiny",), **served)
    ingress = Ingress(
        IngressConfig((model,), timeouts=Timeouts(replica_wait_s=5.0)),
        random.Random(0),
        load=lambda files: make_byte_vocabulary(),
    )
    await ingress.start(StaticMembership({replica.replica_id: replica.address}))
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(build_app(ingress), log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.should_exit = server.force_exit = True
    await serving
    await ingress.stop()
    await replica.kill()


if __name__ == "__main__":
    asyncio.run(serve(ScriptedReplica(script=says(LINE), eos_token_ids=(END,))))
