"""Matches names of entries against patterns with `*`, which stands for any characters, dots too.

All other characters stand for themselves: names contain brackets and question marks.
"""

from __future__ import annotations

import functools
import re


@functools.lru_cache(maxsize=1024)
def compile_pattern(pattern: str, *, prefix: str = "") -> re.Pattern[str]:
    """`prefix`: a regular expression for what precedes the pattern."""
    return re.compile(prefix + ".*".join(map(re.escape, pattern.split("*"))) + r"\Z", re.DOTALL)


def contains(container: str, name: str) -> bool:
    """Whether `name` is `container` or below it: `model.body.weight` is below `model.body`."""
    return name.startswith(container) and name[len(container) : len(container) + 1] in ("", ".")


def matches(name: str, pattern: str) -> bool:
    """Whether `pattern` is the name, contains it, or stands for it."""
    return contains(pattern, name) or ("*" in pattern and compile_pattern(pattern).match(name) is not None)
