"""Two ranks, each a process of its own, answer every kind of request as one does, and end together."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest

from deploy.offline.owned_ranks import OwnedRanks
from shoal import LLM, BeamSearchParams, SamplingParams
from workers.engine.errors import RankLost
from workers.engine.request import ChoiceParams, EngineRequest
from workers.model.rendezvous import new_rendezvous

SHAPE = Path(__file__).parents[2] / "deploy" / "bench" / "shapes" / "tiny"
"""2,048 words in eight stretches, two KV heads."""
PROMPTS = [[7] * 20, list(range(100, 150)), [3, 5, 8], list(range(100, 140))]
OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "dtype": "float32", "skip_tokenizer_init": True, "cpu_threads": 1, "max_num_seqs": 8,
    "max_model_len": 128,
}  # fmt: skip
LENGTH = {"max_tokens": 12, "ignore_eos": True}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 3},
    "filtered": {"seed": 4, "top_k": 50, "top_p": 0.9, "min_p": 0.001},
    "penalized": {"seed": 5, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "with log-probabilities": {"seed": 6, "logprobs": 5},
    "biased": {"temperature": 0, "logit_bias": {5: 4.0, 1900: 4.0}, "min_tokens": 4, "stop_token_ids": [9]},
    "limited": {"seed": 8, "allowed_token_ids": [4, 300, 301, 1700, 2047]},
    "of several choices": {"seed": 9, "n": 3},
}


def answers(llm: LLM) -> dict[str, list[object]]:
    """What comes of each kind of request: tokens, and log-probabilities to four digits."""
    found: dict[str, list[object]] = {}
    for name, fields in KINDS.items():
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in PROMPTS],
            SamplingParams(**LENGTH, **fields),
            use_tqdm=False,
        )
        found[name] = [
            (
                [choice.token_ids for choice in output.outputs],
                [rounded(choice.logprobs) for choice in output.outputs],
            )
            for output in outputs
        ]
    beams = llm.beam_search(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS[:2]], BeamSearchParams(beam_width=3, max_tokens=6)
    )
    found["beams"] = [[beam.tokens for beam in one.sequences] for one in beams]
    found["prompt scores"] = prompt_scores(llm, PROMPTS[1])
    assert len(found["prompt scores"]) == len(PROMPTS[1]) - 1
    vectors = llm.encode([{"prompt_token_ids": prompt} for prompt in PROMPTS], use_tqdm=False)
    found["pooled"] = [[round(float(x), 3) for x in one.outputs.data] for one in vectors]
    return found


def prompt_scores(llm: LLM, prompt: list[int]) -> list[object]:
    """Log-probabilities of the prompt's own tokens, which the offline API does not hand out."""
    engine, executor = llm._loop.engine, llm._loop.executor
    params = ChoiceParams(max_tokens=1, num_prompt_logprobs=4)
    engine.add(EngineRequest("scored", prompt, params), time.monotonic())
    found: list[object] = []
    while engine.has_work:
        while (plan := engine.plan(time.monotonic())) is not None:
            executor.launch(plan)
        for output in engine.apply(executor.collect(), time.monotonic()):
            for one in output.prompt_logprobs or []:
                found.append(
                    (round(one.sampled, 3), one.top_token_ids, [round(x, 3) for x in one.top_logprobs])
                )
    return found


def rounded(logprobs: Any) -> object:
    if logprobs is None:
        return None
    return [
        None if one is None else {token: round(entry.logprob, 3) for token, entry in one.items()}
        for one in logprobs
    ]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="roomy"),
        pytest.param(
            {
                "num_gpu_blocks_override": 8,
                "enable_prefix_caching": False,
                "preemption_mode": "swap",
                "swap_space": 0.05,
                "kv_checksum": True,
                "max_num_batched_tokens": 16,
            },
            id="swapped and in chunks",
        ),
    ],
)
def test_two_ranks_answer_as_one(options: dict[str, Any]) -> None:
    found = []
    for size in (1, 2):
        llm = LLM(str(SHAPE), **OPTIONS, **options, tensor_parallel_size=size)
        try:
            found.append(answers(llm))
            assert (llm.load.num_swap_preemptions > 0) == ("swap_space" in options)
            assert llm.load.num_cached_tokens > 0
        finally:
            llm.close()

    alone, shared = found
    for name in alone:
        assert shared[name] == alone[name], name


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (signal.SIGKILL, r"rank [01] of 2 \(process \d+\) has ended \(killed by SIGKILL, .*make another LLM"),
        (signal.SIGSTOP, r"rank [01] \(process \d+\) is stopped; all 2 ranks .*make another LLM"),
    ],
)
def test_a_lost_rank_ends_all_ranks_and_the_run(
    number: signal.Signals,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    llm = LLM(str(SHAPE), **OPTIONS, tensor_parallel_size=2)
    ranks = [psutil.Process(process.pid) for process in multiprocessing.active_children()]
    assert len(ranks) == 2

    ranks[1].send_signal(number)
    started_s = time.monotonic()
    with pytest.raises(RankLost, match=says):
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(**LENGTH), use_tqdm=False)

    assert "Traceback" not in capfd.readouterr().err
    print(f"{number.name}: all ranks had ended after {time.monotonic() - started_s:.2f} s")
    assert not any(rank.is_running() for rank in ranks)
    assert list(tmp_path.iterdir()) == []
    llm.close()


def test_ranks_leave_it_to_their_parent_what_an_interrupt_means() -> None:
    llm = LLM(str(SHAPE), **OPTIONS, tensor_parallel_size=2)
    params = SamplingParams(**LENGTH, temperature=0)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    before = llm.generate(prompts, params, use_tqdm=False)

    for rank in multiprocessing.active_children():  # as a terminal does
        assert rank.pid is not None
        os.kill(rank.pid, signal.SIGINT)
    after = llm.generate(prompts, params, use_tqdm=False)

    llm.close()
    assert [one.outputs[0].token_ids for one in after] == [one.outputs[0].token_ids for one in before]


def test_an_interrupt_while_ranks_compute_leaves_the_llm_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(SHAPE), **OPTIONS, tensor_parallel_size=2)
    params = SamplingParams(**LENGTH, temperature=0)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    before = llm.generate(prompts, params, use_tqdm=False)
    wait, waits = OwnedRanks._wait, iter([True])

    def interrupted_once(ranks: OwnedRanks) -> bool:
        if next(waits, False):
            raise KeyboardInterrupt
        return wait(ranks)

    monkeypatch.setattr(OwnedRanks, "_wait", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, params, use_tqdm=False)
    after = llm.generate(prompts, params, use_tqdm=False)

    llm.close()
    assert [one.outputs[0].token_ids for one in after] == [one.outputs[0].token_ids for one in before]


@pytest.mark.parametrize("name", ["launch", "_send"], ids=["before a plan is sent", "amid a plan"])
def test_an_interrupt_that_keeps_a_plan_from_ranks_ends_them_and_is_told(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(SHAPE), **OPTIONS, tensor_parallel_size=2)
    ranks = [psutil.Process(process.pid) for process in multiprocessing.active_children()]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(OwnedRanks, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(**LENGTH), use_tqdm=False)

    assert len(ranks) == 2
    assert not any(rank.is_running() for rank in ranks)
    with pytest.raises(
        RankLost, match="all 2 ranks were ended: make another LLM and give it the prompts again"
    ):
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(**LENGTH), use_tqdm=False)
    llm.close()


def both_run(ranks: list[BaseProcess], _: Path) -> bool:
    return len(ranks) == 2


def rank_0_waits_for_others(ranks: list[BaseProcess], folder: Path) -> bool:
    return both_run(ranks, folder) and any(folder.glob("shoal-rendezvous-*"))


@pytest.mark.parametrize(
    ("moment", "number", "says"),
    [
        (both_run, signal.SIGKILL, r"rank 1 of 2 \(process \d+\) has ended \(killed by SIGKILL"),
        (both_run, signal.SIGSTOP, r"rank 1 \(process \d+\) is stopped; all 2 ranks .*load the model again"),
        (
            rank_0_waits_for_others,
            signal.SIGKILL,
            r"rank 1 of 2 \(process \d+\) has ended \(killed by SIGKILL",
        ),
    ],
)
def test_a_rank_that_is_lost_at_start_is_named_at_once(
    moment: Callable[[list[BaseProcess], Path], bool],
    number: signal.Signals,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lost_s: list[float] = []
    found: list[psutil.Process] = []

    def lose_rank_1() -> None:
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            ranks = sorted(multiprocessing.active_children(), key=lambda process: process.pid or 0)
            if moment(ranks, tmp_path):
                found.extend(psutil.Process(process.pid) for process in ranks)
                lost_s.append(time.monotonic())
                found[1].send_signal(number)
                return
            time.sleep(0.01)

    thread = threading.Thread(target=lose_rank_1)
    thread.start()
    with pytest.raises(RankLost, match=says):
        LLM(str(SHAPE), **OPTIONS, tensor_parallel_size=2)
    ended_s = time.monotonic() - lost_s[0]
    thread.join()

    print(f"{number.name} at start: all ranks had ended after {ended_s:.2f} s")
    assert ended_s < 10.0
    assert not any(rank.is_running() for rank in found)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_that_start_end_with_their_parent_and_leave_nothing(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from shoal import LLM\n"
        f"if __name__ == '__main__':\n    LLM({str(SHAPE)!r}, **{OPTIONS!r}, tensor_parallel_size=2)\n"
    )
    folder = tmp_path / "tmp"
    folder.mkdir()
    parent = subprocess.Popen(
        [sys.executable, str(program)],
        env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(SHAPE.parents[3])},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline_s = time.monotonic() + 60
    while not any(folder.glob("shoal-rendezvous-*")):
        assert parent.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    ranks = psutil.Process(parent.pid).children(recursive=True)
    assert len(ranks) >= 2

    parent.send_signal(number)

    _, told = parent.communicate()
    _, left = psutil.wait_procs(ranks, timeout=10)
    assert left == []
    if number == signal.SIGKILL:
        # A rank may have come to the meeting between its parent's end and its own: the next group takes that away.
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        new_rendezvous()
    assert list(folder.iterdir()) == []
    assert "Traceback" not in told
