"""A simulation of whole daemons: virtual time, simulated S3 and trainers, injected faults, and independent checks."""
