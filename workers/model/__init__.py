"""What one rank does: weights, layers, KV pool, forward, sampling."""
