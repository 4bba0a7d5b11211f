"""The step channel from the brain to its ranks: shared memory on one node, ZeroMQ across nodes."""
