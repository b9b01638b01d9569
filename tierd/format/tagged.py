"""Tagged JSON: Python values that are no tensors, as JSON that brings back the same types. No pickle, ever.

Plain JSON values stand for themselves. Everything else is an object with one key that begins with '$':
`{"$tuple": [...]}`, `{"$float": "nan"}`, `{"$bytes": base64}`, `{"$dict": [[key, value], ...]}`. Tensors and
arrays are the caller's leaves: `encode` offers what is neither a plain dict nor plain JSON to `leaf` first, `decode`
gives unknown tags back.
"""

from __future__ import annotations

import base64
import collections
import math
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, cast

from tierd.errors import Corrupt, Unsupported

DEPTH_MAX = 64  # deeper state is a cycle or an attack
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


def encode(value: object, path: str, leaf: Leaf = lambda value, path: None) -> Json:
    """The JSON form of `value`. `leaf` may return a tagged object for what it knows, else None.

    Raises Unsupported, naming the path, for anything without a safe form.
    """
    return _encode(value, path, leaf, 0)


def _encode(value: object, path: str, leaf: Leaf, depth: int) -> Json:
    if depth > DEPTH_MAX:
        raise Unsupported(f"encode {path[:80]}…: nested deeper than {DEPTH_MAX}", hint="is there a cycle in it?")
    kind = type(value)
    if kind is dict:  # what there is most of, before what `leaf` would have to be asked
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
        # sorted, so that the same set always gives the same bytes
        elements = cast("Iterable[object]", value)
        items = sorted(elements, key=repr) if isinstance(value, set | frozenset) else list(elements)
        encoded = [_encode(item, f"{path}[{index}]", leaf, depth + 1) for index, item in enumerate(items)]
        tag = _LISTS.get(kind, "$tuple")  # torch.Size comes back as the tuple that it is
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
        return {key: _encode(item, f"{path}.{key}", leaf, depth + 1) for key, item in value.items()}
    pairs = [
        [
            _encode(key, f"{path}.<key {key!r}>", leaf, depth + 1),
            _encode(item, f"{path}[{key!r}]", leaf, depth + 1),
        ]
        for key, item in value.items()
    ]
    return {_DICTS[type(value)]: pairs}


def are_plain_keys(keys: Collection[Any]) -> bool:
    """Whether a dict with these keys is encoded as an object with the same ones."""
    return _STR.issuperset(map(type, keys)) and not any(map(_TAG, keys))


def _no_leaf(tag: str, content: Json) -> object:
    raise Corrupt(f"decode tagged JSON: unknown tag {tag!r}", hint="written by a newer tierd? upgrade")


def decode(value: Json, unleaf: Unleaf = _no_leaf) -> Any:
    """The value that `encode` was given. `unleaf` makes a value of a tag that is none of ours.

    Raises Corrupt when `value` is not what `encode` writes.
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
            pairs = ((_decode(key, unleaf, depth + 1), _decode(item, unleaf, depth + 1)) for key, item in content)
            made = {"$dict": dict, "$ordered": collections.OrderedDict, "$counter": dict}[tag](pairs)
            return collections.Counter(made) if tag == "$counter" else made
        case _:
            return unleaf(tag, content)
