from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class IngressMessage(_message.Message):
    __slots__ = ("submit", "cancel", "resync", "question", "answer", "release", "show_queue", "num_held_tokens")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    SHOW_QUEUE_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    cancel: Cancel
    resync: Resync
    question: Question
    answer: Answer
    release: Release
    show_queue: ShowQueue
    num_held_tokens: int
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., resync: _Optional[_Union[Resync, _Mapping]] = ..., question: _Optional[_Union[Question, _Mapping]] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., show_queue: _Optional[_Union[ShowQueue, _Mapping]] = ..., num_held_tokens: _Optional[int] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "output_token_ids", "block_hashes", "hash_root", "params", "priority", "arrival_s", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    HASH_ROOT_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_S_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    block_hashes: bytes
    hash_root: bytes
    params: ChoiceParams
    priority: int
    arrival_s: float
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., block_hashes: _Optional[bytes] = ..., hash_root: _Optional[bytes] = ..., params: _Optional[_Union[ChoiceParams, _Mapping]] = ..., priority: _Optional[int] = ..., arrival_s: _Optional[float] = ..., tenant: _Optional[str] = ...) -> None: ...

class ChoiceParams(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "choice_index", "stop_token_ids", "ignore_eos", "num_logprobs", "pooling", "grammar", "thinking_end", "thinking_budget", "allowed_token_ids", "bad_words", "num_prompt_logprobs", "beams")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    THINKING_END_FIELD_NUMBER: _ClassVar[int]
    THINKING_BUDGET_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    BEAMS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    choice_index: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    num_logprobs: int
    pooling: str
    grammar: str
    thinking_end: _containers.RepeatedScalarFieldContainer[int]
    thinking_budget: int
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenIds]
    num_prompt_logprobs: int
    beams: BeamParams
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ..., choice_index: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., num_logprobs: _Optional[int] = ..., pooling: _Optional[str] = ..., grammar: _Optional[str] = ..., thinking_end: _Optional[_Iterable[int]] = ..., thinking_budget: _Optional[int] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., num_prompt_logprobs: _Optional[int] = ..., beams: _Optional[_Union[BeamParams, _Mapping]] = ...) -> None: ...

class BeamParams(_message.Message):
    __slots__ = ("width", "length_penalty", "early_stopping")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    width: int
    length_penalty: float
    early_stopping: bool
    def __init__(self, width: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[bool] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Resync(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Release(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ShowQueue(_message.Message):
    __slots__ = ("least_wait_s", "most")
    LEAST_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    least_wait_s: float
    most: int
    def __init__(self, least_wait_s: _Optional[float] = ..., most: _Optional[int] = ...) -> None: ...

class ReplicaMessage(_message.Message):
    __slots__ = ("hello", "step", "snapshot", "draining", "question", "answer", "coming", "queue")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    COMING_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    step: Step
    snapshot: CacheSnapshot
    draining: Draining
    question: Question
    answer: Answer
    coming: Coming
    queue: Queue
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., snapshot: _Optional[_Union[CacheSnapshot, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., question: _Optional[_Union[Question, _Mapping]] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ..., coming: _Optional[_Union[Coming, _Mapping]] = ..., queue: _Optional[_Union[Queue, _Mapping]] = ...) -> None: ...

class Question(_message.Message):
    __slots__ = ("id", "request_id", "tenant")
    ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    id: int
    request_id: str
    tenant: str
    def __init__(self, id: _Optional[int] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("id", "body")
    ID_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    id: int
    body: bytes
    def __init__(self, id: _Optional[int] = ..., body: _Optional[bytes] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("replica_id", "model", "block_size", "max_model_len", "num_blocks", "max_num_seqs", "hash_root", "generation", "max_num_batched_tokens")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    HASH_ROOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    model: str
    block_size: int
    max_model_len: int
    num_blocks: int
    max_num_seqs: int
    hash_root: bytes
    generation: int
    max_num_batched_tokens: int
    def __init__(self, replica_id: _Optional[str] = ..., model: _Optional[str] = ..., block_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., hash_root: _Optional[bytes] = ..., generation: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("outputs", "cache", "load", "arrived", "kept")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[TokenOutput]
    cache: CacheEvents
    load: Load
    arrived: _containers.RepeatedScalarFieldContainer[int]
    kept: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, outputs: _Optional[_Iterable[_Union[TokenOutput, _Mapping]]] = ..., cache: _Optional[_Union[CacheEvents, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., arrived: _Optional[_Iterable[int]] = ..., kept: _Optional[_Iterable[str]] = ...) -> None: ...

class Queue(_message.Message):
    __slots__ = ("queued",)
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    queued: _containers.RepeatedCompositeFieldContainer[Queued]
    def __init__(self, queued: _Optional[_Iterable[_Union[Queued, _Mapping]]] = ...) -> None: ...

class Queued(_message.Message):
    __slots__ = ("request_id", "num_uncached_tokens", "num_tokens_ahead", "num_attended_ahead", "num_requests_ahead")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_ATTENDED_AHEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    num_uncached_tokens: int
    num_tokens_ahead: int
    num_attended_ahead: int
    num_requests_ahead: int
    def __init__(self, request_id: _Optional[str] = ..., num_uncached_tokens: _Optional[int] = ..., num_tokens_ahead: _Optional[int] = ..., num_attended_ahead: _Optional[int] = ..., num_requests_ahead: _Optional[int] = ...) -> None: ...

class Coming(_message.Message):
    __slots__ = ("number", "block_hashes")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    number: int
    block_hashes: bytes
    def __init__(self, number: _Optional[int] = ..., block_hashes: _Optional[bytes] = ...) -> None: ...

class TokenOutput(_message.Message):
    __slots__ = ("request_id", "token_ids", "finish_reason", "stop_token_id", "logprobs", "num_cached_tokens", "num_preemptions", "error", "error_param", "is_user_error", "pooled", "prompt_logprobs", "waited_s", "num_host_cached_tokens", "beams")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ERROR_PARAM_FIELD_NUMBER: _ClassVar[int]
    IS_USER_ERROR_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BEAMS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: str
    stop_token_id: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    num_cached_tokens: int
    num_preemptions: int
    error: str
    error_param: str
    is_user_error: bool
    pooled: bytes
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    waited_s: float
    num_host_cached_tokens: int
    beams: _containers.RepeatedCompositeFieldContainer[BeamOutput]
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., num_cached_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., error: _Optional[str] = ..., error_param: _Optional[str] = ..., is_user_error: _Optional[bool] = ..., pooled: _Optional[bytes] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., waited_s: _Optional[float] = ..., num_host_cached_tokens: _Optional[int] = ..., beams: _Optional[_Iterable[_Union[BeamOutput, _Mapping]]] = ...) -> None: ...

class BeamOutput(_message.Message):
    __slots__ = ("token_ids", "logprob", "score", "finish_reason", "stop_token_id")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprob: float
    score: float
    finish_reason: str
    stop_token_id: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprob: _Optional[float] = ..., score: _Optional[float] = ..., finish_reason: _Optional[str] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("sampled", "top_token_ids", "top_logprobs", "rank")
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    sampled: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    rank: int
    def __init__(self, sampled: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., rank: _Optional[int] = ...) -> None: ...

class CacheEvents(_message.Message):
    __slots__ = ("first_sequence", "stored", "evicted", "offloaded")
    FIRST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    OFFLOADED_FIELD_NUMBER: _ClassVar[int]
    first_sequence: int
    stored: bytes
    evicted: bytes
    offloaded: bytes
    def __init__(self, first_sequence: _Optional[int] = ..., stored: _Optional[bytes] = ..., evicted: _Optional[bytes] = ..., offloaded: _Optional[bytes] = ...) -> None: ...

class CacheSnapshot(_message.Message):
    __slots__ = ("next_sequence", "hashes", "host_hashes")
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    HOST_HASHES_FIELD_NUMBER: _ClassVar[int]
    next_sequence: int
    hashes: bytes
    host_hashes: bytes
    def __init__(self, next_sequence: _Optional[int] = ..., hashes: _Optional[bytes] = ..., host_hashes: _Optional[bytes] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_queued_tokens", "num_free_blocks", "num_blocks", "num_context_tokens", "kv_waste", "num_preemptions", "num_steps", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "base_s", "per_sequence_s", "per_token_s", "per_context_token_s", "per_attended_s", "copy_base_s", "copy_block_s", "num_queued_attended", "num_host_blocks", "num_free_host_blocks", "num_swap_preemptions", "num_blocks_swapped_out", "num_blocks_swapped_in", "num_corrupt_blocks", "num_host_cached_tokens", "num_forked_blocks", "num_tail_copies", "step_error_p50")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_WASTE_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BASE_S_FIELD_NUMBER: _ClassVar[int]
    PER_SEQUENCE_S_FIELD_NUMBER: _ClassVar[int]
    PER_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    PER_CONTEXT_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    PER_ATTENDED_S_FIELD_NUMBER: _ClassVar[int]
    COPY_BASE_S_FIELD_NUMBER: _ClassVar[int]
    COPY_BLOCK_S_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_ATTENDED_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAP_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_SWAPPED_OUT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_SWAPPED_IN_FIELD_NUMBER: _ClassVar[int]
    NUM_CORRUPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FORKED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TAIL_COPIES_FIELD_NUMBER: _ClassVar[int]
    STEP_ERROR_P50_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_queued_tokens: int
    num_free_blocks: int
    num_blocks: int
    num_context_tokens: int
    kv_waste: float
    num_preemptions: int
    num_steps: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    base_s: float
    per_sequence_s: float
    per_token_s: float
    per_context_token_s: float
    per_attended_s: float
    copy_base_s: float
    copy_block_s: float
    num_queued_attended: int
    num_host_blocks: int
    num_free_host_blocks: int
    num_swap_preemptions: int
    num_blocks_swapped_out: int
    num_blocks_swapped_in: int
    num_corrupt_blocks: int
    num_host_cached_tokens: int
    num_forked_blocks: int
    num_tail_copies: int
    step_error_p50: float
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_queued_tokens: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_context_tokens: _Optional[int] = ..., kv_waste: _Optional[float] = ..., num_preemptions: _Optional[int] = ..., num_steps: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., base_s: _Optional[float] = ..., per_sequence_s: _Optional[float] = ..., per_token_s: _Optional[float] = ..., per_context_token_s: _Optional[float] = ..., per_attended_s: _Optional[float] = ..., copy_base_s: _Optional[float] = ..., copy_block_s: _Optional[float] = ..., num_queued_attended: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., num_free_host_blocks: _Optional[int] = ..., num_swap_preemptions: _Optional[int] = ..., num_blocks_swapped_out: _Optional[int] = ..., num_blocks_swapped_in: _Optional[int] = ..., num_corrupt_blocks: _Optional[int] = ..., num_host_cached_tokens: _Optional[int] = ..., num_forked_blocks: _Optional[int] = ..., num_tail_copies: _Optional[int] = ..., step_error_p50: _Optional[float] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("deadline_s",)
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    deadline_s: float
    def __init__(self, deadline_s: _Optional[float] = ...) -> None: ...
