"""Imported by the fork server before tests.support.preloaded: no garbage collection while that imports torch.

Of what is imported nothing is garbage, and collections were a tenth of the time.
"""

from __future__ import annotations

import gc

gc.disable()
