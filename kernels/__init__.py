"""One operation a file: its definition in plain torch, its launcher, its Triton kernel."""

__version__ = "0.0.0"
