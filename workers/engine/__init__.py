"""The brain: requests, blocks, scheduling. No torch, no Ray, no clock; events in, plans out.

engine          requests in, plans out; results in, tokens out
admission       what is refused at the door
scheduler       which requests compute how many tokens in the next step
draft           a plan in the making
preemption      who gives way when blocks run dry, and where its blocks go
policy          who is served first
request_queue   requests in the order of their turns
request_state   one request: tokens known, tokens computed, its row and its blocks
kv_cache        the blocks of each request, and the prefix cache between them
host_tier       blocks in host memory, and the copies between them and the device
block_pool      which blocks are free, how often each is held, what each still contains
free_list       an ordered set of ids, O(1) everywhere
cache_log       what changed in the prefix cache, numbered, for listeners
cost_model      seconds of work

request, plan, outputs, config, errors, block_hash: the values that cross the border
"""
