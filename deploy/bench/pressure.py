"""Goodput when requests need more KV memory than there is: swap, recompute, and the choice between them.

One model is loaded once; each run has an engine of its own over the same ranks, with as many blocks as the requests
at once would need, divided by the pressure.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from deploy.bench.random_prompts import random_prompt
from deploy.offline.llm import LLM
from deploy.offline.sampling_params import SamplingParams
from workers.engine.errors import InvalidRequest

Mix = Literal["long-in", "long-out", "mixed"]
MIXES: tuple[Mix, ...] = ("long-in", "long-out", "mixed")
MODES: tuple[str, ...] = ("auto", "swap", "recompute", "no swap space")


@dataclass(frozen=True, slots=True)
class PressureLoad:
    """Requests of one total length, most of it prompt or most of it output."""

    num_prompts: int
    num_at_once: int
    num_tokens: int
    """Of each request, prompt and output."""
    pressure: float
    """What the requests at once need, divided by what there is."""

    def lengths(self, mix: Mix) -> list[tuple[int, int]]:
        """Prompt and output tokens of each request: 7 to 1, 1 to 7, or both in turn."""
        short = max(1, self.num_tokens // 8)
        long_in, long_out = (self.num_tokens - short, short), (short, self.num_tokens - short)
        if mix == "mixed":
            return [long_in if i % 2 else long_out for i in range(self.num_prompts)]
        return [long_in if mix == "long-in" else long_out] * self.num_prompts

    def num_blocks(self, block_size: int) -> int:
        """Device blocks of a run."""
        blocks_a_request = -(-self.num_tokens // block_size)
        return max(blocks_a_request, int(self.num_at_once * blocks_a_request / self.pressure))

    def check(self, block_size: int) -> None:
        """Return if a request may have to give way: one that never grows by a block, or is alone, never has to.

        Raises:
            InvalidRequest: none ever has to, so that there is nothing to compare.
        """
        if self.num_tokens <= block_size + 1:  # the last token is never computed, it takes no place
            raise InvalidRequest(
                f"--input-len and --output-len come to {self.num_tokens} tokens, with --kv-pressure requests must "
                f"outgrow a block of {block_size}: give {block_size + 2} or more",
                "input_len",
            )
        if self.num_at_once < 2:
            raise InvalidRequest(
                f"{self.num_prompts} prompts, {self.num_at_once} at once (--num-prompts, --max-num-seqs): with "
                "--kv-pressure they must press each other, give 2 or more of both",
                "num_prompts",
            )

    def check_pressed(self, runs: Sequence[PressureRun]) -> None:
        """Return if a request gave way in one of ``runs``.

        Raises:
            InvalidRequest: none did, so that there is nothing to compare.
        """
        if not any(run.num_preemptions for run in runs):
            raise InvalidRequest(
                f"no request gave way: {self.num_at_once} at once of {self.num_tokens} tokens at --kv-pressure "
                f"{self.pressure:g}, so all modes did the same; raise it, or give more --num-prompts or longer ones",
                "kv_pressure",
            )


@dataclass(frozen=True, slots=True)
class PressureRun:
    """One mix in one mode."""

    mix: str
    mode: str
    num_blocks: int
    num_host_blocks: int
    wall_s: float
    output_tokens_per_s: float
    num_preemptions: int
    num_swapped: int
    num_recomputed: int
    most_preemptions: int
    """Of one request."""
    blocks_out: int
    blocks_in: int
    step_error_p50: float
    """Of the cost model, over the last steps."""
    copy_gb_per_s: float
    """By the cost model."""


def measure_pressure(
    llm: LLM,
    load: PressureLoad,
    mixes: Sequence[Mix] = MIXES,
    modes: Sequence[str] = MODES,
    seed: int = 0,
    told: Callable[[PressureRun], None] = lambda run: None,
) -> list[PressureRun]:
    """Every mix in every mode, each with the same prompts; ``told`` gets each run as it ends.

    Raises:
        InvalidRequest: the load cannot press, or the model was loaded with fewer blocks than a run needs, or none in
            host memory.
    """
    size = llm.engine_config.block_size
    load.check(size)
    num_blocks = load.num_blocks(size)
    check_host_blocks(llm, 1)
    if num_blocks > llm.num_blocks:
        raise InvalidRequest(
            f"{num_blocks} KV blocks are needed, {llm.num_blocks} are there: fewer or shorter prompts",
            "kv_pressure",
        )
    runs = []
    for mix in mixes:
        lengths = load.lengths(mix)
        rng = random.Random(seed)
        prompts = [random_prompt(rng, llm.vocab_size, count) for count, _ in lengths]
        params = [
            SamplingParams(max_tokens=count, temperature=1.0, ignore_eos=True, detokenize=False, seed=i)
            for i, (_, count) in enumerate(lengths)
        ]
        for mode in modes:
            has_host = mode != "no swap space"
            llm.restart_engine(
                num_blocks=num_blocks,
                max_num_seqs=min(load.num_at_once, llm.engine_config.max_num_seqs),
                num_host_blocks=llm.num_host_blocks if has_host else 0,
                preemption_mode=mode if has_host else "recompute",
            )
            started_s = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            wall_s = time.perf_counter() - started_s
            found = llm.load
            num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            assert num_tokens == sum(count for _, count in lengths), "tokens are missing"
            runs.append(
                PressureRun(
                    mix=mix,
                    mode=mode,
                    num_blocks=num_blocks,
                    num_host_blocks=found.num_host_blocks,
                    wall_s=round(wall_s, 3),
                    output_tokens_per_s=round(num_tokens / wall_s, 1),
                    num_preemptions=found.num_preemptions,
                    num_swapped=found.num_swap_preemptions,
                    num_recomputed=found.num_preemptions - found.num_swap_preemptions,
                    most_preemptions=max(output.num_preemptions for output in outputs),
                    blocks_out=found.num_blocks_swapped_out,
                    blocks_in=found.num_blocks_swapped_in,
                    step_error_p50=round(llm.step_error_p50, 4),
                    copy_gb_per_s=round(llm.block_bytes / found.cost.copy_block_s / 1e9, 3),
                )
            )
            told(runs[-1])
    return runs


@dataclass(frozen=True, slots=True)
class HostHit:
    """Time to the first token of a prompt whose prefix is nowhere, in host memory, or on the device."""

    prompt_len: int
    cold_ms: float
    host_ms: float
    device_ms: float
    host_tokens: int
    """Found in host memory, the least of all repeats."""


def check_prompt_len(prompt_len: int, block_size: int) -> None:
    """Return if a prompt has a block that can be found; its last token never is, since it must be computed.

    Raises:
        InvalidRequest: it has none.
    """
    if prompt_len <= block_size:
        raise InvalidRequest(
            f"--prompt-len is {prompt_len}, only whole blocks of {block_size} before the last token are found: give "
            f"{block_size + 1} or more",
            "prompt_len",
        )


def check_host_blocks(llm: LLM, needed: int) -> None:
    """Return if the model was loaded with so many blocks of host memory.

    Raises:
        InvalidRequest: it was not.
    """
    if llm.num_host_blocks < needed:
        raise InvalidRequest(
            f"--swap-space holds {llm.num_host_blocks} blocks of {llm.block_bytes:,} bytes, {needed} are needed: "
            f"give {needed * llm.block_bytes / 2**30:.2g} GiB or more",
            "swap_space",
        )


def measure_host_hit(llm: LLM, prompt_len: int, repeats: int = 3, mode: str = "auto") -> HostHit:
    """The least of ``repeats`` of each; between them other prompts take all blocks of the device.

    Raises:
        InvalidRequest: nothing of the prompt can be found in host memory, or nothing was.
    """
    size = llm.engine_config.block_size
    blocks_a_prompt = -(-(prompt_len + 1) // size)
    check_prompt_len(prompt_len, size)
    check_host_blocks(llm, blocks_a_prompt)
    num_blocks = 4 * blocks_a_prompt
    llm.restart_engine(
        num_blocks=min(num_blocks, llm.num_blocks),
        num_host_blocks=llm.num_host_blocks,
        preemption_mode=mode,
        max_num_batched_tokens=max(size, min(2048, prompt_len)),
    )
    rng = random.Random(7)
    first_token = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False, temperature=0.0)

    def draw() -> list[int]:
        return random_prompt(rng, llm.vocab_size, prompt_len)

    def ask(prompt: list[int]) -> tuple[float, int]:
        before = llm.load.num_host_cached_tokens
        started_s = time.perf_counter()
        llm.generate([prompt], first_token, use_tqdm=False)
        return 1e3 * (time.perf_counter() - started_s), llm.load.num_host_cached_tokens - before

    ask(draw())
    cold, host, device, tokens = [], [], [], prompt_len
    for _ in range(repeats):
        prompt = draw()
        cold.append(ask(prompt)[0])
        device.append(ask(prompt)[0])
        for _ in range(6):
            ask(draw())
        host_ms, host_tokens = ask(prompt)
        host.append(host_ms)
        tokens = min(tokens, host_tokens)
        if not tokens:
            raise InvalidRequest(
                f"no token of a prompt of {prompt_len} came from host memory, which has {llm.num_host_blocks} blocks, "
                f"after 6 other prompts of {blocks_a_prompt} each: give more --swap-space, or a longer prompt where "
                "computing takes less time than copying",
                "swap_space",
            )
    return HostHit(prompt_len, round(min(cold), 2), round(min(host), 2), round(min(device), 2), tokens)
