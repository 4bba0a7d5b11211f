"""Checkpoints on disk: where a model comes from and what its files say. No tensors."""
