"""The commands of `tierd`. Each reads from the tiers or asks the daemon, and prints the result."""

from tierd.cli.app import main

__all__ = ["main"]
