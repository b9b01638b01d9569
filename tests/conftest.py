"""What holds for every test."""

from __future__ import annotations

import signal

# A shell that puts us in the background has us ignore SIGINT, and so would every process that a test starts: then
# none would end by Ctrl-C, whatever its code. A handler of ours is not inherited, so they begin with the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
