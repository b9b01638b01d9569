"""Moves and checks the bytes of whole checkpoints: fetch, verify, repair, drill, atomic output."""
