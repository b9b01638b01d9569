"""The memory that a rank shares with the daemon: the slots, their states, and the pool that hands them out."""
