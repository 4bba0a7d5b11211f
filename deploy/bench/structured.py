"""What forms of output add to a decode step: the same batch with free output, and with grammars."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from deploy.bench.throughput import Workload
from deploy.offline.llm import LLM
from deploy.offline.sampling_params import SamplingParams
from deploy.offline.structured import StructuredOutputsParams
from workers.grammar import GrammarCompiler

PROMPT_LEN = 64
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "note": {"type": "string"},
    },
    "required": ["name", "age", "email", "tags", "note"],
}
# None ends before the output does.
FORMS: Mapping[str, StructuredOutputsParams] = {
    "schema": StructuredOutputsParams(json={"type": "array", "items": _PERSON, "minItems": 1000}),
    "object": StructuredOutputsParams(json={"type": "array", "items": {"type": "object"}, "minItems": 1000}),
    "regex": StructuredOutputsParams(regex="([a-z]{1,30} ){200,300}"),
}
"""A schema of five properties, any objects, and an expression whose masks take fifty times as long."""


@dataclass(frozen=True, slots=True)
class FormedSteps:
    """Decode steps of one batch."""

    form: str
    num_formed: int
    """Rows with a grammar, of all."""
    step_ms: float
    """Mean, by the difference of a long and a short run."""
    num_broken: int
    """Outputs that their grammar, followed anew, does not allow: none, unless sampling is wrong."""


def measure(llm: LLM, num_prompts: int, output_len: int) -> Iterator[FormedSteps]:
    """Free output first; then each form in all rows, and the schema in half of them and in one.

    Each is run once before it is measured.
    """
    wholes = [(name, num_prompts) for name in FORMS]
    for name, count in [("none", 0), *wholes, ("schema", num_prompts // 2), ("schema", 1), ("none", 0)]:
        forms = [FORMS[name] if index < count else None for index in range(num_prompts)]
        _run(llm, forms, 4)
        _, short_s = _run(llm, forms, 1)
        token_ids, long_s = _run(llm, forms, output_len)
        step_ms = 1e3 * (long_s - short_s) / (output_len - 1)
        yield FormedSteps(name, count, round(step_ms, 3), _num_broken(llm, forms, token_ids))


def _run(
    llm: LLM, forms: Sequence[StructuredOutputsParams | None], output_len: int
) -> tuple[list[list[int]], float]:
    """Token ids of each output, and seconds."""
    workload = Workload(len(forms), input_len=PROMPT_LEN, output_len=output_len)
    params = [
        SamplingParams(
            max_tokens=output_len, temperature=1.0, ignore_eos=True, detokenize=False, seed=seed,
            structured_outputs=form,
        )
        for seed, form in enumerate(forms)
    ]  # fmt: skip
    started_s = time.perf_counter()
    outputs = llm.generate(workload.prompts(llm.vocab_size), params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs], time.perf_counter() - started_s


def _num_broken(
    llm: LLM, forms: Sequence[StructuredOutputsParams | None], token_ids: Sequence[Sequence[int]]
) -> int:
    tokenizer = llm.get_tokenizer()
    table = tokenizer.table
    compiler = GrammarCompiler(
        [table.bytes_of(token_id) for token_id in range(len(table))],
        tokenizer.special_token_ids,
        llm.engine_config.eos_token_ids,
    )
    return sum(
        form is not None and not compiler.allows(form.text, ids)
        for form, ids in zip(forms, token_ids, strict=True)
    )
