"""Finds checkpoints with NaN, Inf, or weights that do not change."""
