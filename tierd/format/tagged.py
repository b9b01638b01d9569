"""Tagged JSON: Python values other than tensors as JSON, from which the same types are decoded. No pickle.

Plain JSON values are unchanged. Every other value is an object with one key that begins with '$': `{"$tuple": [...]}`,
`{"$float": "nan"}`, `{"$bytes": base64}`, `{"$dict": [[key, value], ...]}`. The caller encodes tensors and arrays:
`encode` calls `leaf` for every value that is neither a plain dict nor plain JSON, `decode` calls `unleaf` for every
unknown tag.
"""

from __future__ import annotations

import base64
import collections
import math
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, cast

from tierd.errors import Corrupt, Unsupported

DEPTH_MAX = 64  # deeper state has a cycle, or is forged
Json = Any
Leaf = Callable[[object, str], "Json | None"]
Unleaf = Callable[[str, Json], object]

_STR = frozenset({str})
_TAG = re.compile(r"\$").match
_LISTS: dict[type, str | None] = {list: None, tuple: "$tuple", set: "$set", frozenset: "$frozenset"}
_DICTS: dict[type, str] = {
    dict: "$dict",
    collections.OrderedDict: "$ordered",
    collections.Counter: "$counter",
}


def encode(value: object, path: str, leaf: Leaf = lambda value, path: None, depth: int = 0) -> Json:
    """The JSON form of `value`. `leaf` returns a tagged object, or None for a value that it does not encode.

    Raises Unsupported, with the path, for a value without a safe form.
    """
    if depth > DEPTH_MAX:
        raise Unsupported(f"encode {path[:80]}…: nested deeper than {DEPTH_MAX}", hint="is there a cycle in it?")
    kind = type(value)
    if kind is dict:  # the most frequent type first, without a call of `leaf`
        return _encode_dict(cast("dict[Any, Any]", value), path, leaf, depth)
    if value is None or kind in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    tagged = leaf(value, path)
    if tagged is not None:
        return tagged
    if type(value) in (bytes, bytearray):
        return {"$bytes": base64.b64encode(value).decode("ascii")}  # pyright: ignore[reportArgumentType]
    if type(value) is complex:
        return {"$complex": [repr(value.real), repr(value.imag)]}
    is_tuple = isinstance(value, tuple) and not hasattr(value, "_fields")
    if is_tuple or (kind in _LISTS and isinstance(value, list | set | frozenset)):
        # sort sets: the same set must always give the same bytes
        elements = cast("Iterable[object]", value)
        items = sorted(elements, key=repr) if isinstance(value, set | frozenset) else list(elements)
        encoded = [encode(item, f"{path}[{index}]", leaf, depth + 1) for index, item in enumerate(items)]
        tag = _LISTS.get(kind, "$tuple")  # a subclass such as torch.Size is decoded as a tuple
        return encoded if tag is None else {tag: encoded}
    if kind in _DICTS and isinstance(value, dict):
        return _encode_dict(value, path, leaf, depth)
    raise Unsupported(
        f"encode {path}: {kind.__module__}.{kind.__qualname__} has no safe form in a checkpoint",
        hint="keep tensors, arrays, numbers, strings, bytes, lists, tuples, sets and dicts in the state, "
        "or give the object state_dict() and load_state_dict()",
    )


def _encode_dict(value: dict[Any, Any], path: str, leaf: Leaf, depth: int) -> Json:
    if type(value) is dict and are_plain_keys(value):
        return {key: encode(item, f"{path}.{key}", leaf, depth + 1) for key, item in value.items()}
    pairs = [
        [
            encode(key, f"{path}.<key {key!r}>", leaf, depth + 1),
            encode(item, f"{path}[{key!r}]", leaf, depth + 1),
        ]
        for key, item in value.items()
    ]
    return {_DICTS[type(value)]: pairs}


def are_plain_keys(keys: Collection[Any]) -> bool:
    """Whether a dict with these keys is encoded as a JSON object with the same keys."""
    return _STR.issuperset(map(type, keys)) and not any(map(_TAG, keys))


def _no_leaf(tag: str, content: Json) -> object:
    raise Corrupt(f"decode tagged JSON: unknown tag {tag!r}", hint="was it written by a newer tierd? upgrade")


def decode(value: Json, unleaf: Unleaf = _no_leaf) -> Any:
    """The inverse of `encode`. `unleaf` returns the value of an unknown tag.

    Raises Corrupt for JSON that `encode` does not write.
    """
    try:
        return _decode(value, unleaf, 0)
    except (TypeError, ValueError, LookupError, OverflowError) as error:
        raise Corrupt(f"decode tagged JSON: {error}") from error


def _decode(value: Json, unleaf: Unleaf, depth: int) -> Any:
    if depth > 2 * DEPTH_MAX:
        raise ValueError(f"nested deeper than {2 * DEPTH_MAX}")
    if isinstance(value, list):
        return [_decode(item, unleaf, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, content),) = value.items()
        if tag.startswith("$"):
            return _decode_tag(tag, content, unleaf, depth)
    return {key: _decode(item, unleaf, depth + 1) for key, item in value.items()}


def _decode_tag(tag: str, content: Json, unleaf: Unleaf, depth: int) -> Any:
    match tag:
        case "$float":
            return float(content)
        case "$complex":
            return complex(float(content[0]), float(content[1]))
        case "$bytes":
            return base64.b64decode(content, validate=True)
        case "$tuple":
            return tuple(_decode(item, unleaf, depth + 1) for item in content)
        case "$set":
            return {_decode(item, unleaf, depth + 1) for item in content}
        case "$frozenset":
            return frozenset(_decode(item, unleaf, depth + 1) for item in content)
        case "$dict" | "$ordered" | "$counter":
            decoded = {_decode(key, unleaf, depth + 1): _decode(item, unleaf, depth + 1) for key, item in content}
            kind = {"$ordered": collections.OrderedDict, "$counter": collections.Counter}.get(tag, dict)
            return kind(decoded)
        case _:
            return unleaf(tag, content)
