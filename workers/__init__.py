"""The engine: one brain that plans in token ids, and the ranks that compute."""
