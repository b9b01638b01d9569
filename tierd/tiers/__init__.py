"""Stores, and tiers with the commit protocol on top of them. I/O without decisions."""
