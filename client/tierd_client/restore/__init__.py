"""Restores a checkpoint: chooses a replica together with the other ranks and reads it into the live state."""
