"""tierd: the checkpoint sidecar. Kept empty but for the version, because the client imports through it."""

__version__ = "0.1.0"
