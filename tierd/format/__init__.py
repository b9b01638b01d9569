"""The formats: shards, manifests, ids, paths, messages. Pure: no I/O, no clock. Daemon and client use it."""
