"""Captures the state of a training as named tensors and tagged JSON, and plans how to put it back."""
