from __future__ import annotations

import pytest

from workers.engine.request import FinishReason


@pytest.fixture
def stream(make_bench) -> list[int]:
    """The tokens that a request of prompt [1, 2] and seed 3 yields while nothing stops it."""
    bench = make_bench()
    request_id = bench.add([1, 2], max_tokens=10, seed=3)
    bench.run()
    return bench.token_ids[request_id]


def test_an_end_of_sequence_token_ends_the_request_and_is_reported(make_bench, stream) -> None:
    bench = make_bench(eos_token_ids=(stream[3],))
    request_id = bench.add([1, 2], max_tokens=10, seed=3, ignore_eos=False)

    bench.run()

    assert bench.token_ids[request_id] == stream[:4]
    assert bench.outputs[-1].finish_reason is FinishReason.STOP
    assert bench.outputs[-1].stop_token_id == stream[3]


def test_ignore_eos_leaves_the_request_s_own_stop_tokens_in_force(make_bench, stream) -> None:
    bench = make_bench(eos_token_ids=(stream[1],))
    request_id = bench.add([1, 2], max_tokens=10, seed=3, ignore_eos=True, stop_token_ids=(stream[5],))

    bench.run()

    assert bench.token_ids[request_id] == stream[:6]


def test_no_stop_token_ends_a_request_below_min_tokens(make_bench, stream) -> None:
    bench = make_bench()
    request_id = bench.add([1, 2], max_tokens=10, seed=3, min_tokens=6, stop_token_ids=tuple(stream))

    bench.run()

    assert bench.token_ids[request_id] == stream[:6]


def test_max_tokens_ends_a_request_by_length(make_bench, stream) -> None:
    bench = make_bench()
    request_id = bench.add([1, 2], max_tokens=4, seed=3)

    bench.run()

    assert bench.token_ids[request_id] == stream[:4]
    assert bench.outputs[-1].finish_reason is FinishReason.LENGTH
    assert bench.outputs[-1].stop_token_id is None


def test_a_request_begun_elsewhere_goes_on_where_it_was(make_bench, stream) -> None:
    bench = make_bench()
    request_id = bench.add([1, 2], output_token_ids=stream[:4], max_tokens=10, seed=3)

    bench.run()

    assert bench.token_ids[request_id] == stream[4:]


@pytest.mark.parametrize(
    ("num_earlier", "fields", "finish_reason"),
    [
        (4, {"max_tokens": 4}, FinishReason.LENGTH),
        (6, {"max_tokens": 4}, FinishReason.LENGTH),
        (4, {"max_tokens": 9, "stop_by": 3}, FinishReason.STOP),
    ],
)
def test_a_request_that_had_ended_elsewhere_ends_at_once(
    make_bench, stream, num_earlier, fields, finish_reason
) -> None:
    bench = make_bench()
    stop_by = fields.pop("stop_by", None)
    stop_token_ids = () if stop_by is None else (stream[stop_by],)

    bench.add([1, 2], output_token_ids=stream[:num_earlier], seed=3, stop_token_ids=stop_token_ids, **fields)

    assert [output.finish_reason for output in bench.outputs] == [finish_reason]
    assert bench.outputs[0].token_ids == []
    assert bench.outputs[0].stop_token_id == (stop_token_ids[0] if stop_token_ids else None)
    assert not bench.engine.has_work
