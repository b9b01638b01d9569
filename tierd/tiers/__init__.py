"""Where bytes rest: stores, and the one commit protocol over them. I/O, no decisions."""
