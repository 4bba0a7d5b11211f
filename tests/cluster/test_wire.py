"""What crosses the gRPC border comes out as it went in."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster import wire
from cluster.proto import shoal_pb2 as pb
from workers.brain_messages import CacheEvents, CacheSnapshot, Load, TokenOutput
from workers.engine.cost_model import CostModel
from workers.engine.errors import InvalidRequest
from workers.engine.outputs import BeamOutput
from workers.engine.plan import TokenLogprobs
from workers.engine.request import BeamParams, ChoiceParams, EngineRequest, FinishReason

token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=8)


@given(
    prompt=token_ids,
    output=token_ids,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.floats(0, 2),
    num_logprobs=st.none() | st.integers(0, 20),
    bias=st.dictionaries(st.integers(0, 1000), st.floats(-100, 100)),
    beams=st.none()
    | st.builds(BeamParams, st.integers(1, 50), st.floats(-2, 2), st.sampled_from([None, True, False])),
)
def test_a_request_survives_the_wire(
    prompt: list[int],
    output: list[int],
    seed: int,
    temperature: float,
    num_logprobs: int | None,
    bias: dict[int, float],
    beams: BeamParams | None,
) -> None:
    params = ChoiceParams(
        max_tokens=7, temperature=temperature, seed=seed, num_logprobs=num_logprobs, logit_bias=bias,
        stop_token_ids=(3, 4), ignore_eos=True, choice_index=2, pooling="last", grammar="start: /é+/",
        thinking_end=(8, 9), thinking_budget=num_logprobs, allowed_token_ids=(5,), bad_words=((1, 2), (3,)),
        num_prompt_logprobs=num_logprobs, beams=beams,
    )  # fmt: skip
    request = EngineRequest(
        "a", prompt, params, output, [b"x" * 16, b"y" * 16], b"root", priority=-3, arrival_s=1.5
    )

    sent = pb.Submit.FromString(wire.request_to_wire(request).SerializeToString())

    assert wire.request_from_wire(sent, "a") == request


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"])
def test_a_number_that_is_not_finite_is_refused_by_name(name: str) -> None:
    submit = wire.request_to_wire(EngineRequest("a", [1], ChoiceParams(max_tokens=1)))
    setattr(submit.params, name, float("nan"))

    with pytest.raises(InvalidRequest) as caught:
        wire.request_from_wire(submit, "a")

    assert caught.value.param == name


def test_an_unknown_pooling_is_refused() -> None:
    submit = wire.request_to_wire(EngineRequest("a", [1], ChoiceParams(max_tokens=1)))
    submit.params.pooling = "max"

    with pytest.raises(InvalidRequest, match="'max'"):
        wire.request_from_wire(submit, "a")


def test_hashes_that_are_cut_off_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        wire.split_hashes(b"x" * 17)


def test_an_output_survives_the_wire() -> None:
    output = TokenOutput(
        "a",
        [5, 6],
        FinishReason.STOP,
        6,
        [TokenLogprobs(-0.5, [5], [-0.5], 1), TokenLogprobs(-1.5, [], [], 7)],
        32,
        1,
        waited_s=0.25,
        num_host_cached_tokens=16,
    )

    assert wire.output_from_wire(wire.output_to_wire(output, "a")) == output


def test_the_outputs_of_a_beam_search_survive_the_wire() -> None:
    beams = [
        BeamOutput([5, 6], -1.5, -0.5, FinishReason.STOP, 6),
        BeamOutput([7], -2, -1, FinishReason.LENGTH),
    ]
    output = TokenOutput("a", [], FinishReason.STOP, beams=beams)

    assert wire.output_from_wire(wire.output_to_wire(output, "a")) == output


def test_an_error_survives_the_wire() -> None:
    output = TokenOutput(
        "a", [], FinishReason.ERROR, error="too long", error_param="prompt", is_user_error=True
    )

    assert wire.output_from_wire(wire.output_to_wire(output, "a")) == output


def test_load_and_cache_events_survive_the_wire() -> None:
    # Each field has a value of its own, so that one which is forgotten on the way shows.
    counts = {field.name: number for number, field in enumerate(msgspec.structs.fields(Load), 1)}
    load = Load(**{**counts, "cost": CostModel(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)})
    events = CacheEvents(9, [b"a" * 16, b"b" * 16], [b"c" * 16], [b"d" * 16])

    assert wire.load_from_wire(wire.load_to_wire(load)) == load
    assert wire.cache_events_from_wire(wire.cache_events_to_wire(events)) == events


def test_a_snapshot_carries_both_tiers() -> None:
    message = wire.snapshot_to_wire(CacheSnapshot(7, [b"a" * 16], [b"b" * 16, b"c" * 16]))

    assert message.next_sequence == 7
    assert wire.split_hashes(message.hashes) == [b"a" * 16]
    assert wire.split_hashes(message.host_hashes) == [b"b" * 16, b"c" * 16]
