"""Between the gRPC messages of `proto/shoal.proto` and the engine's own values, both ways.

Numbers that the engine would choke on are refused here, since a port is open to more than our own ingress.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Literal

import msgspec

from cluster.proto import shoal_pb2 as pb
from workers.brain_messages import CacheEvents, CacheSnapshot, Load, Queued, QueueShown, TokenOutput
from workers.engine.block_hash import HASH_BYTES
from workers.engine.cost_model import CostModel
from workers.engine.errors import InvalidRequest
from workers.engine.outputs import BeamOutput
from workers.engine.plan import TokenLogprobs
from workers.engine.request import BeamParams, ChoiceParams, EngineRequest, FinishReason


def split_hashes(packed: bytes) -> list[bytes]:
    """Cut concatenated hashes apart.

    Raises:
        InvalidRequest: the length is no multiple of a hash's.
    """
    if len(packed) % HASH_BYTES:
        raise InvalidRequest(
            f"{len(packed)} bytes of block hashes are no multiple of {HASH_BYTES}", "block_hashes"
        )
    return [packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)]


def request_to_wire(request: EngineRequest) -> pb.Submit:
    """What an ingress sends for ``request``."""
    params = request.params
    return pb.Submit(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids,
        block_hashes=b"".join(request.block_hashes),
        hash_root=request.hash_root,
        priority=request.priority,
        tenant=request.tenant,
        arrival_s=request.arrival_s,
        params=pb.ChoiceParams(
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=params.logit_bias,
            seed=params.seed,
            choice_index=params.choice_index,
            stop_token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
            num_logprobs=params.num_logprobs,
            pooling=params.pooling or "",
            num_prompt_logprobs=params.num_prompt_logprobs,
            grammar=params.grammar,
            thinking_end=params.thinking_end,
            thinking_budget=params.thinking_budget,
            allowed_token_ids=params.allowed_token_ids,
            bad_words=[pb.TokenIds(token_ids=word) for word in params.bad_words],
            beams=_beams_to_wire(params.beams),
        ),
    )


def request_from_wire(submit: pb.Submit, request_id: str) -> EngineRequest:
    """The engine's request, under the replica's own id for it.

    Raises:
        InvalidRequest: a number is not finite, or the hashes are cut off.
    """
    params = submit.params
    for name in (
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ):
        value = getattr(params, name)
        if not math.isfinite(value):
            raise InvalidRequest(f"{name} is {value}, it must be finite", name)
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=list(submit.prompt_token_ids),
        output_token_ids=list(submit.output_token_ids),
        block_hashes=split_hashes(submit.block_hashes),
        hash_root=submit.hash_root,
        priority=submit.priority,
        tenant=submit.tenant,
        arrival_s=submit.arrival_s,
        params=ChoiceParams(
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=dict(params.logit_bias),
            seed=params.seed,
            choice_index=params.choice_index,
            stop_token_ids=tuple(params.stop_token_ids),
            ignore_eos=params.ignore_eos,
            num_logprobs=params.num_logprobs if params.HasField("num_logprobs") else None,
            pooling=_pooling(params.pooling),
            num_prompt_logprobs=(
                params.num_prompt_logprobs if params.HasField("num_prompt_logprobs") else None
            ),
            grammar=params.grammar,
            thinking_end=tuple(params.thinking_end),
            thinking_budget=params.thinking_budget if params.HasField("thinking_budget") else None,
            allowed_token_ids=tuple(params.allowed_token_ids),
            bad_words=tuple(tuple(word.token_ids) for word in params.bad_words if word.token_ids),
            beams=_beams_from_wire(params.beams) if params.HasField("beams") else None,
        ),
    )


def _beams_to_wire(beams: BeamParams | None) -> pb.BeamParams | None:
    if beams is None:
        return None
    return pb.BeamParams(
        width=beams.width, length_penalty=beams.length_penalty, early_stopping=beams.early_stopping
    )


def _beams_from_wire(beams: pb.BeamParams) -> BeamParams:
    early_stopping = beams.early_stopping if beams.HasField("early_stopping") else None
    return BeamParams(beams.width, beams.length_penalty, early_stopping)


def _pooling(word: str) -> Literal["mean", "last"] | None:
    match word:
        case "":
            return None
        case "mean":
            return "mean"
        case "last":
            return "last"
    raise InvalidRequest(f"pooling is {word!r}, it must be 'mean' or 'last'", "pooling")


def output_to_wire(output: TokenOutput, request_id: str) -> pb.TokenOutput:
    """New tokens, under the ingress's id of the request."""
    message = pb.TokenOutput(request_id=request_id, token_ids=output.token_ids)
    if output.pooled is not None:
        message.pooled = output.pooled
    if output.finish_reason is not None:
        message.finish_reason = output.finish_reason.value
        message.num_preemptions = output.num_preemptions
        if output.stop_token_id is not None:
            message.stop_token_id = output.stop_token_id
        if output.error is not None:
            message.error = output.error
            message.error_param = output.error_param or ""
            message.is_user_error = output.is_user_error
    if output.num_cached_tokens is not None:
        message.num_cached_tokens = output.num_cached_tokens
        message.num_host_cached_tokens = output.num_host_cached_tokens
    if output.waited_s is not None:
        message.waited_s = output.waited_s
    if output.logprobs is not None:
        message.logprobs.extend(map(_logprobs_to_wire, output.logprobs))
    if output.prompt_logprobs is not None:
        message.prompt_logprobs.extend(map(_logprobs_to_wire, output.prompt_logprobs))
    for beam in output.beams or ():
        message.beams.add(
            token_ids=beam.token_ids,
            logprob=beam.logprob,
            score=beam.score,
            finish_reason=beam.finish_reason.value,
            stop_token_id=beam.stop_token_id,
        )
    return message


def output_from_wire(message: pb.TokenOutput) -> TokenOutput:
    """The inverse of ``output_to_wire``."""
    return TokenOutput(
        request_id=message.request_id,
        token_ids=list(message.token_ids),
        finish_reason=FinishReason(message.finish_reason) if message.finish_reason else None,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        logprobs=_logprobs_from_wire(message.logprobs) if message.logprobs else None,
        num_cached_tokens=message.num_cached_tokens if message.HasField("num_cached_tokens") else None,
        num_preemptions=message.num_preemptions,
        error=message.error or None,
        error_param=message.error_param or None,
        is_user_error=message.is_user_error,
        pooled=message.pooled or None,
        prompt_logprobs=_logprobs_from_wire(message.prompt_logprobs) if message.prompt_logprobs else None,
        waited_s=message.waited_s if message.HasField("waited_s") else None,
        num_host_cached_tokens=message.num_host_cached_tokens,
        beams=[_beam_from_wire(beam) for beam in message.beams] or None,
    )


def _beam_from_wire(beam: pb.BeamOutput) -> BeamOutput:
    return BeamOutput(
        list(beam.token_ids),
        beam.logprob,
        beam.score,
        FinishReason(beam.finish_reason),
        beam.stop_token_id if beam.HasField("stop_token_id") else None,
    )


def _logprobs_to_wire(entry: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        sampled=entry.sampled,
        top_token_ids=entry.top_token_ids,
        top_logprobs=entry.top_logprobs,
        rank=entry.rank,
    )


def _logprobs_from_wire(messages: Iterable[pb.TokenLogprobs]) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(entry.sampled, list(entry.top_token_ids), list(entry.top_logprobs), entry.rank)
        for entry in messages
    ]


def cache_events_to_wire(events: CacheEvents) -> pb.CacheEvents:
    """Hashes packed, 16 bytes each."""
    return pb.CacheEvents(
        first_sequence=events.first_sequence,
        stored=b"".join(events.stored),
        offloaded=b"".join(events.offloaded),
        evicted=b"".join(events.evicted),
    )


def cache_events_from_wire(message: pb.CacheEvents) -> CacheEvents:
    """The inverse of ``cache_events_to_wire``."""
    return CacheEvents(
        message.first_sequence,
        split_hashes(message.stored),
        split_hashes(message.evicted),
        split_hashes(message.offloaded),
    )


def snapshot_to_wire(snapshot: CacheSnapshot) -> pb.CacheSnapshot:
    """Hashes packed, 16 bytes each."""
    return pb.CacheSnapshot(
        next_sequence=snapshot.next_sequence,
        hashes=b"".join(snapshot.hashes),
        host_hashes=b"".join(snapshot.host_hashes),
    )


def queue_to_wire(shown: QueueShown) -> pb.Queue:
    """Under the ingress's ids."""
    start = len(shown.prefix)
    return pb.Queue(
        queued=[
            pb.Queued(
                request_id=one.request_id[start:],
                num_uncached_tokens=one.num_uncached_tokens,
                num_tokens_ahead=one.num_tokens_ahead,
                num_attended_ahead=one.num_attended_ahead,
                num_requests_ahead=one.num_requests_ahead,
            )
            for one in shown.queued
        ]
    )


def queue_from_wire(message: pb.Queue) -> list[Queued]:
    """Who stands in line."""
    return [
        Queued(
            one.request_id,
            one.num_uncached_tokens,
            one.num_tokens_ahead,
            one.num_attended_ahead,
            one.num_requests_ahead,
        )
        for one in message.queued
    ]


_LOAD_COUNTS = tuple(field.name for field in msgspec.structs.fields(Load) if field.name != "cost")
_COSTS = tuple(field.name for field in dataclasses.fields(CostModel))


def load_to_wire(load: Load) -> pb.Load:
    """Counts and cost coefficients."""
    message = pb.Load(**{name: getattr(load, name) for name in _LOAD_COUNTS})
    for name in _COSTS:
        setattr(message, name, getattr(load.cost, name))
    return message


def load_from_wire(message: pb.Load) -> Load:
    """The inverse of ``load_to_wire``."""
    return Load(
        **{name: getattr(message, name) for name in _LOAD_COUNTS},
        cost=CostModel(**{name: getattr(message, name) for name in _COSTS}),
    )
