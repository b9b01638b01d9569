"""How long to wait before the next attempt: exponential backoff with jitter, for the daemon and for the client."""

from __future__ import annotations

import random


def backoff_s(failures: int, *, min_s: float, max_s: float) -> float:
    """Seconds to wait after `failures` attempts in a row have failed (1 or more).

    Doubles from `min_s` to `max_s`, times a random factor of 0.5 to 1 so that ranks and nodes do not retry in step.
    """
    return min(max_s, min_s * 2 ** min(failures - 1, 32)) * random.uniform(0.5, 1.0)
