"""The operator's verbs. Thin: each asks a tier, the catalog or the daemon, and says what it found."""

from tierd.cli.app import main

__all__ = ["main"]
