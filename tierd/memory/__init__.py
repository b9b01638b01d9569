"""The memory tier: the slots of trainers and the snapshots in them."""
