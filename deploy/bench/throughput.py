"""Offline throughput: fixed numbers of random prompt tokens in and of greedy tokens out, at several batch sizes."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from deploy.bench.random_prompts import random_prompt
from deploy.offline.llm import LLM
from deploy.offline.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of random token ids; lengths uniform over a range where ``spread`` is not 0."""

    num_prompts: int
    input_len: int
    output_len: int
    shared_len: int = 0
    """Leading tokens that all prompts share, within ``input_len``."""
    spread: int = 0
    """Lengths are drawn from ``len - spread .. len``."""
    temperature: float = 0.0
    seed: int = 0

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Token ids of each prompt; ids below 100 are left out, since most are control tokens."""
        rng = random.Random(self.seed)
        draw = lambda count: random_prompt(rng, vocab_size, count)  # noqa: E731
        shared = draw(self.shared_len)
        return [
            shared + draw(rng.randint(self.input_len - self.spread, self.input_len) - self.shared_len)
            for _ in range(self.num_prompts)
        ]

    def params(self) -> list[SamplingParams]:
        """Sampling of each prompt: a fixed number of tokens, whatever is sampled."""
        rng = random.Random(self.seed + 1)
        return [
            SamplingParams(
                max_tokens=rng.randint(self.output_len - self.spread, self.output_len),
                temperature=self.temperature,
                ignore_eos=True,
                detokenize=False,
                seed=i,
            )
            for i in range(self.num_prompts)
        ]


@dataclass(frozen=True, slots=True)
class Throughput:
    """Wall time of one ``generate`` call over a workload."""

    num_prompts: int
    input_len: int
    output_len: int
    wall_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    cached_tokens: int


def measure(llm: LLM, workload: Workload, vocab_size: int, repeats: int = 1) -> Throughput:
    """Best of ``repeats`` runs; each has prompts of its own, so that the prefix cache finds nothing."""
    best: Throughput | None = None
    for repeat in range(repeats):
        one = replace(workload, seed=workload.seed + 1000 * repeat)
        prompts, params = one.prompts(vocab_size), one.params()
        started_s = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        wall_s = time.perf_counter() - started_s
        num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
        num_input = sum(len(prompt) for prompt in prompts)
        found = Throughput(
            num_prompts=one.num_prompts,
            input_len=one.input_len,
            output_len=one.output_len,
            wall_s=round(wall_s, 5),
            output_tokens_per_s=round(num_output / wall_s, 1),
            total_tokens_per_s=round((num_output + num_input) / wall_s, 1),
            cached_tokens=sum(output.num_cached_tokens for output in outputs),
        )
        if best is None or found.wall_s < best.wall_s:
            best = found
    assert best is not None, "repeats is at least 1"
    return best


def measure_all(llm: LLM, workloads: Sequence[Workload], vocab_size: int, repeats: int) -> list[Throughput]:
    """One figure a workload, each after a short warm-up of its size."""
    results = []
    for number, given in enumerate(workloads):
        workload = replace(
            given, seed=given.seed + 100_000 * number
        )  # or the cache would have its first prompts
        measure(llm, replace(workload, output_len=8, spread=0, seed=workload.seed + 77), vocab_size)
        results.append(measure(llm, workload, vocab_size, repeats))
    return results


@dataclass(frozen=True, slots=True)
class StepTime:
    """Time to the first token of a batch of prompts, then of one decode step."""

    batch_size: int
    input_len: int
    num_steps: int
    first_token_ms: float
    """Of the whole batch, prefill of all prompts included."""
    step_ms: float


def measure_steps(
    llm: LLM, batch_sizes: Sequence[int], input_len: int, num_steps: int, vocab_size: int, repeats: int
) -> list[StepTime]:
    """Differences of two runs, with and without the decode steps; the least of ``repeats``."""
    results = []
    for size in batch_sizes:
        # A seed's prompts begin alike whatever their length and number: none may have been cached by another call.
        seed = 1000 * (1 + size + 5003 * input_len + 7 * num_steps)
        measure(llm, Workload(size, input_len, 4, seed=seed), vocab_size)
        first_s = [
            measure(llm, Workload(size, input_len, 1, seed=seed + 100 + i), vocab_size).wall_s
            for i in range(repeats)
        ]
        whole_s = [
            measure(llm, Workload(size, input_len, 1 + num_steps, seed=seed + 200 + i), vocab_size).wall_s
            for i in range(repeats)
        ]
        step_s = (min(whole_s) - min(first_s)) / num_steps if num_steps else 0.0
        results.append(
            StepTime(size, input_len, num_steps, round(1e3 * min(first_s), 3), round(1e3 * step_s, 3))
        )
    return results
