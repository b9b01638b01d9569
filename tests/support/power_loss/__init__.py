"""Loss of power by model: real file operations are recorded, and every legal state of the disk is recovered from.

file_calls.py records the operations and lets them fail. volatile_disk.py says what a loss of power may leave.
scenarios.py runs the real workers. promises.py reads the states with code of its own. explorer.py puts them together.
"""
