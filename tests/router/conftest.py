"""An ingress in this process, in front of scripted replicas, with a vocabulary of single bytes."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import uvicorn
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from router.app import build_app
from router.config import IngressConfig, Limits, Observability, ServedModelConfig, Timeouts
from router.ingress import Ingress
from router.membership import Membership, StaticMembership
from router.openai.heartbeat import Sleep
from router.replica_set import ReplicaSet
from router.scripted_replica import Script, ScriptedReplica
from router.tenancy.keys import KeyRing
from workers.checkpoint.source import ModelFiles
from workers.checkpoint.vocabulary import Vocabulary, byte_level_bytes

START, END = 256, 257
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def byte_vocabulary() -> Vocabulary:
    """Token id = byte; 256 and 257 are control tokens."""
    return make_byte_vocabulary()


def make_byte_vocabulary() -> Vocabulary:
    """See ``byte_vocabulary``."""
    alphabet = {byte_level_bytes([char], [])[0][0]: char for char in pre_tokenizers.ByteLevel.alphabet()}
    tokens = [alphabet[byte] for byte in range(256)] + ["<|start|>", "<|end|>"]
    pipeline = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    pipeline.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tokens[256:]])
    return Vocabulary(
        pipeline_json=pipeline.to_str(),
        token_bytes=byte_level_bytes(tokens, [START, END]),
        special_token_ids=frozenset((START, END)),
        special_tokens={"eos_token": "<|end|>"},
        chat_template=TEMPLATE,
    )


def says(text: str) -> Script:
    """A script that says ``text`` to everyone."""
    token_ids = list(text.encode())
    return lambda submit: token_ids


@dataclass
class Edge:
    """A running ingress, its replicas, and a client that speaks to it without a socket."""

    ingress: Ingress
    replicas: list[ScriptedReplica]
    membership: Membership
    app: Any
    client: httpx.AsyncClient
    servers: list[tuple[uvicorn.Server, asyncio.Task[None]]] = field(default_factory=list)

    @property
    def replica(self) -> ScriptedReplica:
        """The only replica."""
        (replica,) = self.replicas
        return replica

    @property
    def replica_set(self) -> ReplicaSet:
        """The replicas of the only model."""
        return self.ingress.models[0].replicas

    async def until(self, condition: Callable[[], bool]) -> None:
        """Give the event loop turns until ``condition`` holds."""
        while not condition():  # noqa: ASYNC110  # what is waited for is plain state of the code under test
            await asyncio.sleep(0.001)

    async def until_metric(self, line: str) -> None:
        """Scrape until the metrics hold ``line``."""
        while line not in (await self.client.get("/metrics")).text.splitlines():  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async def chat(self, **fields: Any) -> httpx.Response:
        """A chat request with defaults."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def complete(self, **fields: Any) -> httpx.Response:
        """A completion request with defaults."""
        return await self.client.post("/v1/completions", json={"model": "tiny", "prompt": "hello", **fields})

    async def listen(self) -> str:
        """Serve on a real socket; the base URL."""
        listening = socket.create_server(("127.0.0.1", 0))
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)  # a slow reader shows soon
        server = uvicorn.Server(uvicorn.Config(self.app, log_level="error", lifespan="off"))
        task = asyncio.create_task(server.serve(sockets=[listening]))
        self.servers.append((server, task))
        await self.until(lambda: server.started)
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    async def close(self) -> None:
        """End everything; nothing may be left at the router."""
        await self.client.aclose()
        for server, task in self.servers:
            server.should_exit = server.force_exit = True
            await task
        assert self.replica_set.num_placed == 0, "requests are left behind"
        for view in self.replica_set.open_views:
            view.check()
        self.replica_set.index.check()
        await self.ingress.stop()
        for replica in self.replicas:
            await replica.kill()


@pytest.fixture(scope="session")
def engine_replica() -> ModuleType:
    """The module ``engine_replica.py``."""
    spec = importlib.util.spec_from_file_location(
        "engine_replica", Path(__file__).with_name("engine_replica.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["engine_replica"] = module  # dataclasses look there for names in annotations
    spec.loader.exec_module(module)
    return module


MakeEdge = Callable[..., Awaitable[Edge]]


@pytest.fixture
async def make_edge(byte_vocabulary: Vocabulary) -> AsyncIterator[MakeEdge]:
    """Start replicas and an ingress before them; awaits until all streams are open."""
    edges: list[Edge] = []

    async def make(
        *replicas: ScriptedReplica,
        limits: Limits | None = None,
        timeouts: Timeouts | None = None,
        max_model_len: int = 4096,
        membership: Membership | None = None,
        trace_folder: Path | None = None,
        sleep: Sleep = asyncio.sleep,
        keys: KeyRing | None = None,
        served: Mapping[str, Any] | None = None,
        wake: Callable[[str], None] = lambda group: None,
        observability: Observability | None = None,
        policy: str = "prefix",
    ) -> Edge:
        for number, replica in enumerate(replicas):
            replica.replica_id = f"replica-{number}"
            replica.eos_token_ids = (END,)
            await replica.start()
        config = IngressConfig(
            models=(
                ServedModelConfig(
                    ModelFiles(Path("tiny.gguf"), "tiny"),
                    max_model_len,
                    **{"names": ("tiny", "alias"), **(served or {})},
                ),
            ),
            policy=policy,
            limits=limits or Limits(),
            timeouts=timeouts or Timeouts(),
            keys=keys,
            trace_folder=trace_folder,
            observability=observability or Observability(),
        )
        ingress = Ingress(config, random.Random(0), load=lambda files: byte_vocabulary, wake=wake)
        membership = membership or StaticMembership({r.replica_id: r.address for r in replicas})
        await ingress.start(membership)
        app = build_app(ingress, sleep=sleep)
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://edge")
        edge = Edge(ingress, list(replicas), membership, app, client)
        edges.append(edge)
        await edge.until(lambda: len(edge.replica_set.open_views) == len(replicas))
        return edge

    yield make
    for edge in edges:
        await edge.close()
