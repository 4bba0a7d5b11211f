"""The brain: requests, blocks, scheduling. No torch, no Ray, no clock; events in, plans out."""
