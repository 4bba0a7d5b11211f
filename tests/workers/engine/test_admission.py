from __future__ import annotations

import pytest

from workers.engine.errors import InvalidRequest, PromptTooLong


def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(make_bench) -> None:
    bench = make_bench(max_model_len=64)

    with pytest.raises(PromptTooLong, match=r"64 tokens.*takes 64") as refusal:
        bench.add(64)

    assert refusal.value.param == "prompt"
    assert not bench.engine.has_work


def test_a_request_that_could_outgrow_the_pool_is_refused_with_both_numbers(make_bench) -> None:
    bench = make_bench(num_blocks=4, block_size=4)

    with pytest.raises(PromptTooLong, match=r"18 tokens.*holds 16") as refusal:
        bench.add(8, max_tokens=10)

    assert refusal.value.param == "max_tokens"


def test_a_request_that_just_fits_the_pool_runs_to_its_end(make_bench) -> None:
    bench = make_bench(num_blocks=4, block_size=4)
    bench.add(8, max_tokens=9)  # 17 tokens, the last of which is never computed

    bench.run()

    bench.assert_all_as_expected()


def test_max_tokens_beyond_the_context_is_cut_by_the_context(make_bench) -> None:
    bench = make_bench(max_model_len=16)
    request_id = bench.add(10, max_tokens=1000)

    bench.run()

    assert len(bench.token_ids[request_id]) == 6
    assert bench.finish_reasons[request_id] == "length"


@pytest.mark.parametrize(
    ("prompt", "fields", "param"),
    [
        ([], {}, "prompt"),
        ([1, 2], {"max_tokens": 0}, "max_tokens"),
        ([1, -1], {}, "prompt"),
        ([1, 1000], {}, "prompt"),
    ],
)
def test_values_that_cannot_be_served_name_their_field(make_bench, prompt, fields, param) -> None:
    bench = make_bench(vocab_size=1000)

    with pytest.raises(InvalidRequest) as refusal:
        bench.add(prompt, **fields)

    assert refusal.value.param == param
    assert not bench.engine.has_work


def test_token_ids_that_no_hash_can_hold_are_refused_without_a_vocabulary_too(make_bench) -> None:
    bench = make_bench()

    with pytest.raises(InvalidRequest, match="2147483648"):
        bench.add([1, 2**31])


def test_an_id_in_use_is_refused_and_the_first_request_goes_on(make_bench) -> None:
    bench = make_bench()
    bench.add(request_id="twin")

    with pytest.raises(InvalidRequest, match="twin"):
        bench.add(request_id="twin")

    bench.run()
    assert bench.finish_reasons == {"twin": "length"}


def test_an_id_can_be_used_again_once_its_request_was_aborted_with_a_step_in_flight(make_bench) -> None:
    bench = make_bench(run_ahead=1)
    bench.add(request_id="twin", seed=1)
    bench.plan()
    bench.engine.abort("twin")

    bench.add(request_id="twin", seed=2)
    bench.run()

    bench.assert_all_as_expected()


@pytest.mark.parametrize("name", ["num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens"])
def test_a_config_without_room_is_refused(make_bench, name) -> None:
    with pytest.raises(ValueError, match=name):
        make_bench(**{name: 0})
