"""The brain: requests, blocks, scheduling. No torch, no Ray, no clock; events in, plans out.

engine          requests in, plans out; results in, tokens out
admission       what is refused at the door
scheduler       which requests compute how many tokens in the next step
batch_rows      who has which row of the batch
waiting_work    what waiting requests will have to compute
draft           a plan in the making
preemption      who gives way when blocks run dry, and where its blocks go
policy          who is served first
request_queue   requests in the order of their turns
request_state   one request: tokens known, tokens computed, its row and its blocks
beam_search     which beams of a search go on, and what it has found
beam_group      the requests that are the beams of one search
kv_cache        the blocks of each request, what they share, and the prefix cache between them
host_tier       blocks in host memory, and the copies between them and the device
block_pool      which blocks are free, how often each is held, what each still contains
free_list       an ordered set of ids, O(1) everywhere
cache_log       what changed in the prefix cache, numbered, for listeners
cost_model      seconds of work

request, plan, outputs, config, errors, block_hash: the values that cross the border
"""
