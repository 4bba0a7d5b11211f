"""Puts the parts together: CLI, settings, the Serve application, offline LLM, benchmarks."""
