"""Kills real daemons and trainers at failpoints and at random, and checks what they leave with code of its own."""
