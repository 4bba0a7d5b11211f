"""Which recorded graph a step takes and what it is told, on graphs that run again what was recorded on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from kernels.chunk_attention import ChunkWork
from kernels.decode_attention_work import DecodeAttention, DecodeWork
from workers.engine.plan import NewRow, StepPlan
from workers.engine.request import ChoiceParams
from workers.model.batch import Batch
from workers.model.chunk_work import ChunkCut, chunk_cut
from workers.model.prefill_graphs import PrefillGraphs
from workers.model.step_inputs import StepInputs


class Recorder:
    """Stands in for CUDA's graphs: a replay runs the decoder again on the inputs of the recording."""

    def __init__(self) -> None:
        self.recording: Recorder.Graph | None = None

    class Graph:
        replay: Callable[[], None]

        def pool(self) -> None:
            return None

    @contextmanager
    def record(self, graph: Graph, **_: Any) -> Iterator[None]:
        self.recording = graph
        yield
        self.recording = None


class Decoder:
    """Gives tokens back, and notes what each run was told of pieces."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.told: list[tuple[int, ChunkWork | None]] = []

    def attend_all(self, inputs: StepInputs, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        attended, residual = torch.zeros(inputs.num_tokens), torch.zeros(inputs.num_tokens)

        def run() -> None:
            self.told.append((inputs.num_tokens, inputs.prefill_chunks))
            attended.copy_(inputs.token_ids)
            residual.copy_(inputs.positions)

        if self.recorder.recording is not None:
            self.recorder.recording.replay = run  # type: ignore[method-assign]
        run()
        return attended, residual


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()

    class Stream:
        def wait_stream(self, _: object) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorder.Graph)
    monkeypatch.setattr(torch.cuda, "graph", found.record)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    return found


def make_graphs(recorder: Recorder, way: ChunkCut | None) -> tuple[PrefillGraphs, Decoder, Batch]:
    batch, decoder, nothing = Batch(4, 8192, 16, torch.device("cpu")), Decoder(recorder), torch.zeros(0)
    work = DecodeAttention(batch.block_tables, DecodeWork(*[nothing] * 6), None)
    graphs = PrefillGraphs(decoder, torch.zeros(1), batch, work, way)  # type: ignore[arg-type]
    graphs.capture(2048)
    decoder.told.clear()
    return graphs, decoder, batch


def test_few_tokens_take_the_graph_with_pieces_after_a_long_context_alone(recorder: Recorder) -> None:
    way = chunk_cut(num_heads=32, num_kv_heads=8, num_processors=132)
    graphs, decoder, batch = make_graphs(recorder, way)
    tokens = np.random.default_rng(0).integers(0, 30_000, 8192).tolist()
    ended = 0
    # New tokens, and the size and kind of the graph that they take.
    steps = [(16, 64, False), (5000, None, False), (16, 64, True), (100, 128, True), (3, 64, True)]
    for step, (count, size, has_pieces) in enumerate(steps):
        new = [NewRow(0, tokens, len(tokens), ChoiceParams(max_tokens=2))] if step == 0 else []
        blocks = [*range(-(-ended // 16), -(-(ended + count) // 16))]
        plan = StepPlan(step, new, [0], [ended], [count], [True], [blocks])
        batch.apply(plan)
        arrays = batch.arrays(plan, None, has_work=True, has_tiles=True, chunk_cut=way)
        assert graphs.fits(arrays) == (size is not None)
        if size is None:
            ended += count
            continue

        attended, residual, sample_tokens = graphs.run(arrays)

        ((num_tokens, pieces),) = decoder.told
        decoder.told.clear()
        assert (num_tokens, pieces is not None) == (size, has_pieces)
        assert attended[:count].tolist() == tokens[ended : ended + count]
        assert residual[:count].tolist() == [*range(ended, ended + count)]
        assert sample_tokens.tolist() == [count - 1]
        if pieces is not None:
            assert arrays.chunks is not None
            for told, cut in (
                (pieces.tiles, arrays.chunks.tiles),
                (pieces.items, arrays.chunks.items),
                (pieces.shares, arrays.chunks.shares),
                (pieces.merges, arrays.chunks.merges),
            ):
                assert (told[: len(cut)].numpy() == cut).all()
            assert not pieces.merges[count:].any(), "padding merges nothing"
        ended += count


def test_without_a_cut_no_graph_has_pieces(recorder: Recorder) -> None:
    graphs, decoder, batch = make_graphs(recorder, None)
    plan = StepPlan(0, [NewRow(0, [1, 2, 3], 3, ChoiceParams(max_tokens=2))], [0], [0], [3], [True], [[0]])
    batch.apply(plan)

    graphs.run(batch.arrays(plan, None, has_work=True, has_tiles=True))

    assert [(size, pieces is None) for size, pieces in decoder.told] == [(64, True)]
