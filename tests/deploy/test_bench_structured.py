"""The measure of forms of output runs, and finds them followed."""

from __future__ import annotations

import pytest

from deploy.bench.structured import measure
from shoal import LLM
from workers.checkpoint.source import ModelFiles


@pytest.mark.slow
def test_each_form_is_measured_and_followed(demo_model: ModelFiles) -> None:
    llm = LLM(str(demo_model.path), max_model_len=256, max_num_seqs=4, kv_cache_gib=0.25)

    found = list(measure(llm, num_prompts=4, output_len=16))

    llm.close()
    assert [(one.form, one.num_formed) for one in found] == [
        *(("none", 0), ("schema", 4), ("object", 4), ("regex", 4), ("schema", 2), ("schema", 1), ("none", 0)),
    ]
    assert sum(one.step_ms for one in found) > 0  # a single one may drown in what else the machine does
    assert [one.num_broken for one in found] == [0] * 7
