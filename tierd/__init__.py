"""tierd: a checkpoint sidecar for PyTorch. Only the version is here: importing the client runs this file too."""

__version__ = "0.1.0"
