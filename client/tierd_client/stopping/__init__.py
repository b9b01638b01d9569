"""Stops a run at a step that all ranks agree on, and records how it ended."""
