"""Quantized weights: how each format is stored, cut over ranks and multiplied. Formats know nothing of models."""
