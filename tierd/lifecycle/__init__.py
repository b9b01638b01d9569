"""What may and should happen: pure functions and tables, no I/O, no clock."""
