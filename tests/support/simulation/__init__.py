"""A simulation of whole daemons: virtual time, real workers and stores, simulated S3 and trainers, injected faults.

Read in this order: loop.py (time, order, deaths), schedule.py (what a seed decides), world.py (runs a schedule),
daemon.py, trainer.py, bucket.py, disk.py (the parts), checker.py (the promises), seeds.py (many seeds, replay, shrink).
The seam is below the stores: S3Store runs over a simulated S3 API, DirectoryStore over a folder in memory. The loop
delays the jobs of both, and the jobs of a killed process never run.
"""
