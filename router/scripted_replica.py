"""A replica without an engine: the same gRPC service, with tokens from a script.

For tests of the router and for measuring the HTTP path by itself. It answers as a replica does (Hello, cache
snapshot, a Step per step), and can be told to stall, to drain or to die. ``python -m router.scripted_replica``
runs one in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio

from cluster.proto import shoal_pb2 as pb
from cluster.proto import shoal_pb2_grpc
from cluster.service import SERVER_OPTIONS

Script = Callable[[pb.Submit], Sequence[int]]
"""All output tokens of a request, as an engine would sample them from nothing; cut at ``max_tokens``."""


def counting_script(submit: pb.Submit) -> Sequence[int]:
    """Tokens that depend on seed, choice and position alone, as an engine's do; never below 1000."""
    params = submit.params
    first = params.seed * 31 + params.choice_index * 7
    return [1000 + (first + position * 13) % 30000 for position in range(params.max_tokens)]


@dataclass(slots=True)
class _Running:
    submit: pb.Submit
    token_ids: Sequence[int]
    outbox: asyncio.Queue[pb.ReplicaMessage]
    next_token: int
    is_first: bool = True


@dataclass(slots=True)
class ScriptedReplica(shoal_pb2_grpc.ReplicaServicer):
    """One replica on a port of this host. ``start`` it; it steps by itself unless ``step_s`` is None."""

    replica_id: str = "scripted"
    script: Script = counting_script
    step_s: float | None = 0.0
    """Pause between steps; None: a step is taken by calling ``step`` only."""
    eos_token_ids: tuple[int, ...] = (2,)
    block_size: int = 16
    max_num_seqs: int = 64
    seats: int | None = None
    """Requests that get tokens at a time, the first ones; the others have not begun. None: all get them."""
    max_model_len: int = 1 << 20
    model: str = ""
    held_hashes: list[bytes] = field(default_factory=list)
    """What its first snapshot says, on the device."""
    held_host_hashes: list[bytes] = field(default_factory=list)
    """In host memory alone, likewise."""
    load: pb.Load = field(
        default_factory=lambda: pb.Load(base_s=0.008, per_sequence_s=0.0001, per_token_s=1e-4)
    )
    """Sent with each step; ``num_running`` and ``num_steps`` are filled in."""
    host: str = "127.0.0.1"
    port: int = 0
    submits: list[pb.Submit] = field(default_factory=list)
    num_held_tokens: int = 0
    """As the last ingress said that sent a request."""
    cancelled_ids: list[str] = field(default_factory=list)
    is_hesitant: bool = False
    """Asked for requests back, it answers when ``give_back`` is called."""
    released_ids: list[str] = field(default_factory=list)
    num_asked_back: int = 0
    """Requests that ingresses have asked back."""
    num_resyncs: int = 0
    num_greeted: int = 0
    """Times that an ingress attached."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever a message has come."""
    _server: grpc.aio.Server | None = None
    _running: dict[str, _Running] = field(default_factory=dict)
    _outboxes: list[asyncio.Queue[pb.ReplicaMessage]] = field(default_factory=list)
    _asked_back: list[tuple[asyncio.Queue[pb.ReplicaMessage], Sequence[str]]] = field(default_factory=list)
    _num_steps: int = 0
    _next_sequence: int = 0
    _stepper: asyncio.Task[None] | None = None
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def address(self) -> str:
        """Where an ingress attaches."""
        return f"{self.host}:{self.port}"

    @property
    def num_running(self) -> int:
        """Requests that are not finished or cancelled."""
        return len(self._running)

    @property
    def num_attached(self) -> int:
        """Ingresses with a stream here."""
        return len(self._outboxes)

    async def start(self) -> None:
        """Listen; on a free port, unless one is set (as it is after the first time)."""
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        shoal_pb2_grpc.add_ReplicaServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(self.address)
        await self._server.start()
        if self.step_s is not None:
            self._stepper = asyncio.create_task(self._step_forever(self.step_s))

    async def kill(self) -> None:
        """Die as a process does: streams break, requests are gone."""
        if self._stepper is not None:
            self._stepper.cancel()
            await asyncio.gather(self._stepper, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(None)
            self._server = None
        self._running.clear()

    def stall(self) -> None:
        """Take no more steps, though the connection lives."""
        if self._stepper is not None:
            self._stepper.cancel()

    def step(self) -> None:
        """One token for each running request, one message for each ingress."""
        self._num_steps += 1
        outputs: dict[int, list[pb.TokenOutput]] = {id(outbox): [] for outbox in self._outboxes}
        for running in list(self._running.values())[: self.seats]:
            output = self._next_output(running)
            outputs.setdefault(id(running.outbox), []).append(output)
            if output.finish_reason:
                del self._running[running.submit.request_id]
        load = pb.Load()
        load.CopyFrom(self.load)
        self._count(load)
        for outbox in self._outboxes:
            outbox.put_nowait(pb.ReplicaMessage(step=pb.Step(outputs=outputs[id(outbox)], load=load)))

    def _count(self, load: pb.Load) -> None:
        """What runs and what waits; of those that wait, prompts are to be computed whole."""
        waiting = self._waiting
        load.num_running = len(self._running) - len(waiting)
        if self.seats is not None:  # otherwise as a test has set it
            load.num_waiting = len(waiting)
        load.num_steps = self._num_steps
        if waiting:
            load.num_queued_tokens = sum(len(one.submit.prompt_token_ids) for one in waiting)

    @property
    def _waiting(self) -> list[_Running]:
        return list(self._running.values())[self.seats :] if self.seats is not None else []

    def _queue(self, outbox: asyncio.Queue[pb.ReplicaMessage], asked: pb.ShowQueue) -> pb.Queue:
        queue, num_ahead, num_tokens = pb.Queue(), len(self._running) - len(self._waiting), 0
        for one in self._waiting:
            num_prompt = len(one.submit.prompt_token_ids)
            if one.outbox is outbox and one.is_first and len(queue.queued) < asked.most:
                queue.queued.add(
                    request_id=one.submit.request_id,
                    num_uncached_tokens=num_prompt,
                    num_tokens_ahead=num_tokens,
                    num_requests_ahead=num_ahead,
                )
            num_tokens += num_prompt
            num_ahead += 1
        return queue

    def give_back(self) -> None:
        """Answer for all requests that were asked back: those that wait are given, others kept."""
        asked, self._asked_back = self._asked_back, []
        for outbox, request_ids in asked:
            waiting = {one.submit.request_id for one in self._waiting if one.is_first}
            step = pb.Step(load=self.load)
            for request_id in request_ids:
                if request_id in waiting:
                    del self._running[request_id]
                    self.released_ids.append(request_id)
                    step.outputs.add(request_id=request_id, finish_reason="released")
                elif request_id in self._running:
                    step.kept.append(request_id)
            self._count(step.load)
            outbox.put_nowait(pb.ReplicaMessage(step=step))

    def send_cache(
        self,
        stored: Sequence[bytes],
        evicted: Sequence[bytes] = (),
        offloaded: Sequence[bytes] = (),
        *,
        skip: int = 0,
    ) -> None:
        """Report cache events, in a step without outputs; ``skip`` makes a gap before them."""
        self._next_sequence += skip
        events = pb.CacheEvents(
            first_sequence=self._next_sequence,
            stored=b"".join(stored),
            evicted=b"".join(evicted),
            offloaded=b"".join(offloaded),
        )
        self._next_sequence += len(stored) + len(evicted) + len(offloaded)
        for outbox in self._outboxes:
            outbox.put_nowait(pb.ReplicaMessage(step=pb.Step(cache=events)))

    def refuse(self, request_id: str, message: str, param: str) -> None:
        """End a running request as a mistake of its caller."""
        running = self._running.pop(request_id)
        output = pb.TokenOutput(
            request_id=request_id, finish_reason="error", error=message, error_param=param, is_user_error=True
        )
        running.outbox.put_nowait(pb.ReplicaMessage(step=pb.Step(outputs=[output])))

    def abort_all(self) -> None:
        """Cut all requests off, as a replica does whose time to drain is over."""
        for request_id, running in self._running.items():
            output = pb.TokenOutput(request_id=request_id, finish_reason="abort")
            running.outbox.put_nowait(pb.ReplicaMessage(step=pb.Step(outputs=[output])))
        self._running.clear()

    def drain(self, deadline_s: float) -> None:
        """Say that no further requests are taken."""
        for outbox in self._outboxes:
            outbox.put_nowait(pb.ReplicaMessage(draining=pb.Draining(deadline_s=deadline_s)))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds; looked at whenever a message has come."""
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    async def Attach(  # the service's name
        self, request_iterator: AsyncIterator[pb.IngressMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ReplicaMessage]:
        """Serve one ingress."""
        outbox: asyncio.Queue[pb.ReplicaMessage] = asyncio.Queue()
        reader = asyncio.create_task(self._read(request_iterator, outbox))
        try:
            outbox.put_nowait(pb.ReplicaMessage(hello=self._hello()))
            outbox.put_nowait(pb.ReplicaMessage(step=pb.Step(load=self.load)))
            outbox.put_nowait(pb.ReplicaMessage(snapshot=self._snapshot()))
            self._outboxes.append(outbox)
            self.num_greeted += 1
            self.changed.set()
            while True:
                yield await outbox.get()
        finally:
            reader.cancel()
            if outbox in self._outboxes:
                self._outboxes.remove(outbox)
            for running in [r for r in self._running.values() if r.outbox is outbox]:
                self._running.pop(running.submit.request_id, None)
            self.changed.set()

    async def _read(
        self, messages: AsyncIterator[pb.IngressMessage], outbox: asyncio.Queue[pb.ReplicaMessage]
    ) -> None:
        async for message in messages:
            kind = message.WhichOneof("kind")
            if kind == "submit":
                submit = message.submit
                self.submits.append(submit)
                self.num_held_tokens = message.num_held_tokens
                token_ids = self.script(submit)[: submit.params.max_tokens]
                self._running[submit.request_id] = _Running(
                    submit, token_ids, outbox, len(submit.output_token_ids)
                )
                self._wake.set()
            elif kind == "cancel":
                for request_id in message.cancel.request_ids:
                    self.cancelled_ids.append(request_id)
                    self._running.pop(request_id, None)
            elif kind == "show_queue":
                outbox.put_nowait(pb.ReplicaMessage(queue=self._queue(outbox, message.show_queue)))
            elif kind == "release":
                self._asked_back.append((outbox, message.release.request_ids))
                self.num_asked_back += len(message.release.request_ids)
                if not self.is_hesitant:
                    self.give_back()
            elif kind == "resync":
                self.num_resyncs += 1
                outbox.put_nowait(pb.ReplicaMessage(snapshot=self._snapshot()))
            self.changed.set()

    def _next_output(self, running: _Running) -> pb.TokenOutput:
        submit, params = running.submit, running.submit.params
        if params.HasField("beams"):
            return self._searched(running)
        position = running.next_token
        running.next_token += 1
        if position >= len(running.token_ids):  # the script ran out before max_tokens: the model's own end
            token_id = self.eos_token_ids[0]
        else:
            token_id = running.token_ids[position]
        output = pb.TokenOutput(request_id=submit.request_id, token_ids=[token_id])
        if running.is_first:
            output.num_cached_tokens = 0
            output.waited_s = 0.25
            running.is_first = False
            if params.HasField("num_prompt_logprobs"):
                for prompt_id in submit.prompt_token_ids[1:]:
                    top = [prompt_id + i for i in range(params.num_prompt_logprobs)]
                    output.prompt_logprobs.add(
                        sampled=-0.25, top_token_ids=top, top_logprobs=[-0.25 - i for i in range(len(top))]
                    )
        ends = () if params.ignore_eos else self.eos_token_ids
        if token_id in ends or token_id in params.stop_token_ids:
            output.finish_reason, output.stop_token_id = "stop", token_id
        elif running.next_token >= params.max_tokens:
            output.finish_reason = "length"
        if params.pooling:
            output.pooled = struct.pack("<4f", *(len(submit.prompt_token_ids) + i for i in range(4)))
        if params.HasField("num_logprobs"):
            top = [token_id + i for i in range(params.num_logprobs)]
            output.logprobs.add(
                sampled=-0.5, top_token_ids=top, top_logprobs=[-0.5 - i for i in range(params.num_logprobs)]
            )
        return output

    def _searched(self, running: _Running) -> pb.TokenOutput:
        """What a beam search has found: the script's tokens, and with their last one once more from beam to beam."""
        submit, params = running.submit, running.submit.params
        output = pb.TokenOutput(request_id=submit.request_id, num_cached_tokens=0, finish_reason="length")
        for number in range(params.beams.width):
            said = [*running.token_ids, *[running.token_ids[-1]] * number, self.eos_token_ids[0]]
            beam = output.beams.add(
                token_ids=said[: params.max_tokens], logprob=-1.0 - number, score=-1.0 - number
            )
            beam.finish_reason = "length"
            if len(said) <= params.max_tokens:
                beam.finish_reason, beam.stop_token_id = "stop", said[-1]
        return output

    async def _step_forever(self, step_s: float) -> None:
        while True:
            if not self._running:
                self._wake.clear()
                await self._wake.wait()
            self.step()
            await asyncio.sleep(step_s)

    def _hello(self) -> pb.Hello:
        return pb.Hello(
            replica_id=self.replica_id,
            model=self.model,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            num_blocks=4096,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=1024,
            hash_root=b"scripted",
            generation=1,
        )

    def _snapshot(self) -> pb.CacheSnapshot:
        return pb.CacheSnapshot(
            next_sequence=self._next_sequence,
            hashes=b"".join(self.held_hashes),
            host_hashes=b"".join(self.held_host_hashes),
        )


async def _serve(replica: ScriptedReplica) -> None:
    await replica.start()
    print(replica.address, flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Serve until interrupted; the address is printed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--step-ms", type=float, default=0.0, help="pause between steps")
    arguments = parser.parse_args()
    asyncio.run(_serve(ScriptedReplica(port=arguments.port, step_s=arguments.step_ms / 1000)))


if __name__ == "__main__":
    main()
