"""The doors: the Unix socket for trainers, HTTP for people and Prometheus."""
