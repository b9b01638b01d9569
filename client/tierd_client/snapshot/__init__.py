"""Takes a snapshot: finds a slot, copies the state into it, hands it to the daemon."""
