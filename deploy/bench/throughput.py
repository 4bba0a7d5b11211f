"""Offline throughput: fixed numbers of random prompt tokens in and of greedy tokens out, at several batch sizes."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

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
        draw = lambda count: [rng.randrange(100, vocab_size) for _ in range(count)]  # noqa: E731
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
        one = Workload(**{**asdict(workload), "seed": workload.seed + 1000 * repeat})
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
            wall_s=round(wall_s, 3),
            output_tokens_per_s=round(num_output / wall_s, 1),
            total_tokens_per_s=round((num_output + num_input) / wall_s, 1),
            cached_tokens=sum(output.num_cached_tokens for output in outputs),
        )
        if best is None or found.wall_s < best.wall_s:
            best = found
    assert best is not None, "repeats is at least 1"
    return best


def measure_batches(
    llm: LLM, batch_sizes: Sequence[int], input_len: int, output_len: int, vocab_size: int, repeats: int
) -> list[Throughput]:
    """One run a batch size, after a short warm-up of that size."""
    results = []
    for size in batch_sizes:
        measure(llm, Workload(size, input_len, 8, seed=77), vocab_size)
        results.append(measure(llm, Workload(size, input_len, output_len), vocab_size, repeats))
    return results
