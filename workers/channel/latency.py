"""How long a plan takes from the brain until every rank has decoded it.

    python -m workers.channel.latency --ranks 2 --rows 64

Ranks are processes of their own. All of one machine read one monotonic clock, so one-way times can be taken
directly; each plan is sent when the answer to the one before has come and ``gap_s`` has passed, so every rank
is asleep, as between two steps of a small model.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import msgspec

from workers.channel.executor import ChannelExecutor
from workers.channel.link import BrainLost, connect, new_endpoint
from workers.engine.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class ChannelLatency:
    """Seconds, over all plans but those of the warm-up."""

    num_ranks: int
    num_plans: int
    p50_s: float
    """From before the plan is encoded until the last rank has decoded it."""
    p99_s: float
    first_p50_s: float
    """The same until the first rank has."""
    round_trip_p50_s: float
    """Until the brain has decoded the answer of rank 0."""
    launch_p50_s: float
    """Until the brain has rung every rank's doorbell: with a core for each rank, what more ranks add."""

    def __str__(self) -> str:
        return (
            f"{self.num_ranks} ranks, {self.num_plans} plans: all have it after {self.p50_s * 1e6:.0f} us (p50), "
            f"{self.p99_s * 1e6:.0f} us (p99); the first after {self.first_p50_s * 1e6:.0f} us; "
            f"there and back {self.round_trip_p50_s * 1e6:.0f} us; sent in {self.launch_p50_s * 1e6:.0f} us"
        )


def measure_latency(
    num_ranks: int,
    num_plans: int = 1000,
    num_rows: int = 64,
    gap_s: float = 0.001,
    num_warmup: int = 100,
    endpoint: str | None = None,
) -> ChannelLatency:
    """Send decode plans of ``num_rows`` rows to ``num_ranks`` fresh processes.

    Args:
        endpoint: the channel to measure; None takes the fastest of this machine.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="shoal-latency-") as directory:
        endpoint = endpoint or new_endpoint(directory)
        executor = ChannelExecutor(endpoint, num_ranks)
        pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
        ranks = [
            context.Process(target=_serve_stamps, args=(endpoint, rank, pipe[1]), daemon=True)
            for rank, pipe in enumerate(pipes)
        ]
        try:
            for process in ranks:
                process.start()
            executor.wait_for_ranks(60.0)
            sent_s, launched_s, answered_s = _send_plans(executor, num_warmup + num_plans, num_rows, gap_s)
        finally:
            executor.close()  # which ends the ranks: they tell their stamps and go
        stamps_s = [receiver.recv() for receiver, _ in pipes]
        for process in ranks:
            process.join()
    received_s = list(zip(*stamps_s, strict=True))[num_warmup:]
    sent_s, launched_s, answered_s = (one[num_warmup:] for one in (sent_s, launched_s, answered_s))
    last = sorted(max(at) - sent for at, sent in zip(received_s, sent_s, strict=True))
    return ChannelLatency(
        num_ranks=num_ranks,
        num_plans=num_plans,
        p50_s=statistics.median(last),
        p99_s=last[int(0.99 * len(last))],
        first_p50_s=statistics.median(min(at) - sent for at, sent in zip(received_s, sent_s, strict=True)),
        round_trip_p50_s=statistics.median(
            back - sent for back, sent in zip(answered_s, sent_s, strict=True)
        ),
        launch_p50_s=statistics.median(
            launched - sent for launched, sent in zip(launched_s, sent_s, strict=True)
        ),
    )


def _send_plans(
    executor: ChannelExecutor, num_plans: int, num_rows: int, gap_s: float
) -> tuple[list[float], list[float], list[float]]:
    """When each plan was about to be encoded, when it had been sent, and when its answer was decoded."""
    rows = list(range(num_rows))
    sent_s: list[float] = []
    launched_s: list[float] = []
    answered_s: list[float] = []
    for step_id in range(num_plans):
        starts = [1000 + step_id] * num_rows
        plan = StepPlan(step_id, [], rows, starts, [1] * num_rows, [True] * num_rows, [[]] * num_rows)
        sent_s.append(time.monotonic())
        executor.launch(plan)
        launched_s.append(time.monotonic())
        executor.collect(timeout_s=10.0)
        answered_s.append(time.monotonic())
        time.sleep(gap_s)
    return sent_s, launched_s, answered_s


def _serve_stamps(endpoint: str, rank: int, pipe: Connection) -> None:
    """A rank that notes when it has decoded each plan and, as rank 0, answers with nothing."""
    link = connect(endpoint, rank, 60.0)
    decoder, encoder = msgspec.msgpack.Decoder(StepPlan), msgspec.msgpack.Encoder()
    stamps_s: list[float] = []
    try:
        while (payload := link.receive(None)) is not None:
            plan = decoder.decode(payload)
            stamps_s.append(time.monotonic())
            if rank == 0:
                link.send(encoder.encode(StepResult(plan.step_id, [0] * len(plan.rows))))
    except BrainLost:
        pipe.send(stamps_s)
    finally:
        link.close()


def main() -> int:
    """Print the latency for a number of ranks."""
    parser = argparse.ArgumentParser(description="Latency of the step channel")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--plans", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--gap-us", type=float, default=1000.0, help="between an answer and the next plan")
    parser.add_argument("--endpoint", help="for example tcp://127.0.0.1:5555#key; shared memory if left out")
    arguments = parser.parse_args()
    for num_ranks in arguments.ranks:
        gap_s = arguments.gap_us / 1e6
        print(measure_latency(num_ranks, arguments.plans, arguments.rows, gap_s, endpoint=arguments.endpoint))
    return 0


if __name__ == "__main__":
    sys.exit(main())
