"""The step channel from the brain to its ranks: shared memory on one node, ZeroMQ across nodes.

executor    the brain's end: launch, collect
serve       a rank's end: the loop that runs plans
link        what both kinds of channel offer, and which endpoint means which
local       shared memory, doorbells and a Unix socket that tells who died
ring        the bytes in that shared memory
remote      ZeroMQ
latency     how long a plan takes to reach all ranks
"""

from workers.channel.executor import ChannelExecutor
from workers.channel.link import BrainLost, new_endpoint
from workers.channel.serve import serve_steps

__all__ = ["BrainLost", "ChannelExecutor", "new_endpoint", "serve_steps"]
