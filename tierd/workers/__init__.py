"""The workers, which copy, verify and delete checkpoints. The decisions come from lifecycle."""
