"""Benchmarks: offline throughput, HTTP load; figures go to `results/` with commit, settings and date."""
