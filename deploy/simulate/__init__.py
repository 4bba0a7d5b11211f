"""A recorded trace through the router's policies and the engine's scheduler, in virtual time, on a CPU."""
