"""What bytes mean: shards, manifests, ids, paths, messages. Pure: no I/O, no clock. Shared by daemon and client."""
