"""Between the router's own values and the messages of `cluster/proto/shoal.proto`."""

from __future__ import annotations

from cluster.proto import shoal_pb2 as pb
from router.placement.replica_view import ReplicaLoad, ReplicaShape
from workers.engine.cost_model import CostModel
from workers.engine.request import EngineRequest


def submit_message(request: EngineRequest) -> pb.IngressMessage:
    """Encode a request for a replica."""
    params = request.params
    return pb.IngressMessage(
        submit=pb.Submit(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=request.output_token_ids,
            block_hashes=b"".join(request.block_hashes),
            hash_root=request.hash_root,
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
            ),
            priority=request.priority,
            arrival_s=request.arrival_s,
        )
    )


def cancel_message(request_ids: list[str]) -> pb.IngressMessage:
    """Encode the end of requests that nobody waits for."""
    return pb.IngressMessage(cancel=pb.Cancel(request_ids=request_ids))


def resync_message() -> pb.IngressMessage:
    """Encode the wish for a new snapshot of the cache."""
    return pb.IngressMessage(resync=pb.Resync())


def shape_of(hello: pb.Hello) -> ReplicaShape:
    """Decode what a replica says of itself."""
    return ReplicaShape(
        block_size=hello.block_size,
        max_num_seqs=hello.max_num_seqs,
        max_num_batched_tokens=hello.max_num_batched_tokens,
        num_blocks=hello.num_blocks,
        max_model_len=hello.max_model_len,
        hash_root=hello.hash_root,
    )


def load_of(load: pb.Load) -> ReplicaLoad:
    """Decode a step's load."""
    return ReplicaLoad(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_queued_tokens=load.num_queued_tokens,
        num_context_tokens=load.num_context_tokens,
        num_free_blocks=load.num_free_blocks,
        num_blocks=load.num_blocks,
        kv_waste=load.kv_waste,
        num_preemptions=load.num_preemptions,
        num_steps=load.num_steps,
        num_prompt_tokens=load.num_prompt_tokens,
        num_cached_tokens=load.num_cached_tokens,
        num_output_tokens=load.num_output_tokens,
        cost=CostModel(load.base_s, load.per_sequence_s, load.per_token_s, load.per_context_token_s),
    )
