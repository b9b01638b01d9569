"""Keys in files: of signatures, and of nodes that read from each other."""
