"""The daemon's interfaces: the Unix socket for trainers, HTTP for people and Prometheus."""
