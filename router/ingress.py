"""What one ingress process owns: its models' tokenizers, and their replicas."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from router.config import IngressConfig, Limits, ServedModelConfig
from router.generation import Generation, TextParams
from router.journal import Prompt
from router.ledger import Ledger
from router.membership import Membership
from router.placement.policy import POLICIES
from router.placement.prefix_index import PrefixIndex
from router.replica_set import ReplicaSet
from router.served_model import ServedModel
from router.telemetry.traces import Traces
from router.tenancy.gate import Gate
from router.text.tokenizer import Tokenizer
from router.tokenizing import Tokenizing
from router.trace_recorder import TraceRecorder
from workers.checkpoint.source import ModelFiles
from workers.checkpoint.vocabulary import Vocabulary, load_vocabulary
from workers.engine.errors import UnknownModel
from workers.engine.request import ChoiceParams

_RETIRE_POLL_S = 1.0
_DRAIN_POLL_S = 0.05
_LAST_WORDS_S = 2.0
"""For the last event of a stream that is ended to reach its client."""
_RECALL_TIMEOUT_S = 2.0
"""For the other ingresses to say what they know of a request."""


def _no_wake(group: str) -> None:
    """Replicas come by themselves."""


class Ingress:
    """Owner of everything behind the HTTP API; construct anywhere, ``start`` on the event loop.

    ``rng`` draws seeds for requests that bring none; ``load`` reads a model's vocabulary.
    """

    def __init__(
        self,
        config: IngressConfig,
        rng: random.Random | None = None,
        load: Callable[[ModelFiles], Vocabulary] = load_vocabulary,
        wake: Callable[[str], None] = _no_wake,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``wake`` is called, with the model's group, when a request finds no replica: again for each one."""
        self.config = config
        self.gate = Gate(clock)
        """Lets callers in as far as their limits reach."""
        self.ledger = Ledger(clock)
        """What can be told of requests."""
        self.traces: Traces | None = None
        """Whom to tell of each generation; None: nobody."""
        self.models: list[ServedModel] = []
        self._tokenizing = Tokenizing(config.limits.max_unbounded_chars)
        self._membership = Membership()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        self._rng = rng or random.SystemRandom()
        self._load = load
        self._wake = wake

    @property
    def limits(self) -> Limits:
        """What one caller may ask for."""
        return self.config.limits

    @property
    def num_tasks(self) -> int:
        """Asyncio tasks of this process's loop: what goes on rising under a steady load is a leak. On any thread."""
        return len(asyncio.all_tasks(self._loop)) if self._loop is not None else 0

    async def start(self, membership: Membership) -> None:
        """Read tokenizers (half a second each, in a thread) and begin to connect to replicas.

        Raises:
            UnknownModel: a model's files hold no tokenizer that is understood; nothing was started.
        """
        self._membership = membership
        self._loop = asyncio.get_running_loop()
        await self.set_models(self.config.models)

    async def set_models(self, configs: Sequence[ServedModelConfig]) -> None:
        """Serve these models and no others from now on; one whose settings are the same is left alone.

        A model that leaves cannot be named any more, and ends when its requests have.

        Raises:
            UnknownModel: a model's files hold no tokenizer that is understood; nothing has changed.
        """
        kept = {model.config: model for model in self.models if model.config in configs}
        added = [config for config in configs if config not in kept]
        vocabularies = await asyncio.gather(
            *(asyncio.to_thread(self._load, config.files) for config in added)
        )
        for config, vocabulary in zip(added, vocabularies, strict=True):
            replicas = ReplicaSet(
                POLICIES[self.config.policy](),
                PrefixIndex(self.config.max_index_hashes),
                self.config.limits,
                self.config.timeouts,
                partial(self._wake, config.group),
                self.ledger.find,
            )
            replicas.start(self._membership, config.group)
            folder = self.config.trace_folder
            recorder = (
                TraceRecorder(folder, config.served_names[0], time.time) if folder is not None else None
            )
            if config.chat_template is not None:
                vocabulary = replace(vocabulary, chat_template=config.chat_template)
            kept[config] = ServedModel(config, Tokenizer(vocabulary), replicas, self._tokenizing, recorder)
        for config in configs:
            kept[config].config = config  # equal ones may differ in what is only told
        leaving = [model for model in self.models if model.config not in configs]
        self.models = [kept[config] for config in configs]
        for model in leaving:
            task = asyncio.create_task(_retire(model))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)

    async def drain(self, timeout_s: float) -> int:
        """Let nobody in any more, and give those who are in ``timeout_s`` to have their answers.

        Returns:
            How many did not; each has been told by an error, streams by their last event.
        """
        self.gate.is_closed = True
        await self._until_empty(timeout_s)
        num_left = self.gate.num_running
        await self.stop()
        await self._until_empty(_LAST_WORDS_S)
        return num_left

    async def _until_empty(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while loop.time() < deadline_s:
            if not self.gate.num_running:
                return
            await asyncio.sleep(_DRAIN_POLL_S)

    async def stop(self) -> None:
        """End all streams. Safe to call twice."""
        retiring = list(self._retiring)
        for task in retiring:
            task.cancel()
        await asyncio.gather(*retiring, return_exceptions=True)
        await asyncio.gather(*(model.stop() for model in self.models))
        self._tokenizing.close()

    def model(self, name: str) -> ServedModel:
        """The model that clients call ``name``.

        Raises:
            UnknownModel: it is not served here.
        """
        for model in self.models:
            if name in model.config.served_names:
                return model
        served = ", ".join(name for model in self.models for name in model.config.served_names) or "none"
        raise UnknownModel(f"model {name[:80]!r} is not served here (served: {served})", "model")

    async def recall(self, request_id: str, tenant: str) -> bytes:
        """What is known of a request of ``tenant``, whichever ingress has it, as JSON; empty: nothing."""
        found = self.ledger.find(request_id, tenant)
        if found:
            return found
        streams = [stream for model in self.models for stream in model.replicas.streams if stream.is_open]
        if not streams:
            return b""
        try:
            async with asyncio.timeout(_RECALL_TIMEOUT_S):
                return await streams[0].ask(request_id, tenant)
        except TimeoutError:
            return b""

    def draw_seed(self) -> int:
        """A seed for a request that brings none."""
        return self._rng.getrandbits(63)

    def generation(
        self,
        model: ServedModel,
        request_id: str,
        prompts: Sequence[Prompt],
        params: Sequence[ChoiceParams],
        text: TextParams,
    ) -> Generation:
        """A generation that has not started yet."""
        return Generation(
            request_id,
            prompts,
            params,
            text,
            model.tokenizer.table,
            model.replicas,
            self.limits.max_unread_outputs,
            asyncio.get_running_loop().time(),
            model.recorder,
        )


async def _retire(model: ServedModel) -> None:
    """End a model's streams once no request has been at its replicas for a while."""
    num_quiet = 0
    try:
        while num_quiet < 2:  # a request on its way from a lost replica to another is at none for a moment
            await asyncio.sleep(_RETIRE_POLL_S)
            num_quiet = 0 if model.replicas.num_placed else num_quiet + 1
    finally:
        await model.stop()
