"""Tagged JSON: Python values other than tensors as JSON, from which the same types are decoded. No pickle.

Plain JSON values are unchanged. Every other value is an object with one key that begins with '$': `{"$tuple": [...]}`,
`{"$float": "nan"}`, `{"$bytes": base64}`, `{"$dict": [[key, value], ...]}`. The caller encodes tensors and arrays:
`encode` calls `leaf` for every value that is neither a plain dict nor plain JSON, `decode` calls `unleaf` for every
unknown tag.
"""

from __future__ import annotations

import base64
import collections
import datetime
import decimal
import math
import pathlib
import re
import struct
from collections.abc import Callable, Collection, Iterable
from typing import Any, cast

from tierd.errors import Corrupt, Unsupported

DEPTH_MAX = 64  # deeper state has a cycle, or is forged
INT_BITS_MAX = 4096  # of an integer in decimal: Python's JSON reads at most 4300 digits
Json = Any
Leaf = Callable[[object, str], "Json | None"]
Unleaf = Callable[[str, Json], object]

_STR = frozenset({str})
_NAN = struct.pack(">d", math.nan)
_TAG = re.compile(r"\$").match
_LISTS: dict[type, str | None] = {list: None, tuple: "$tuple", set: "$set", frozenset: "$frozenset"}
_TEXTS: dict[type, tuple[str, Callable[[Any], str], Callable[[str], object]]] = {
    datetime.date: ("$date", datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.datetime: ("$datetime", datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.time: ("$time", datetime.time.isoformat, datetime.time.fromisoformat),
    decimal.Decimal: ("$decimal", str, decimal.Decimal),
    pathlib.PosixPath: ("$path", str, pathlib.PosixPath),
}
"""Types with an exact text: tag, to text, from text."""

_FROM_TEXT = {tag: from_text for tag, _, from_text in _TEXTS.values()}
_FACTORIES: dict[str, Callable[[], object]] = {kind.__name__: kind for kind in (int, float, list, dict, set)}
"""The factories of a defaultdict that have a name in a checkpoint."""

_DICTS: dict[type, str] = {
    dict: "$dict",
    collections.OrderedDict: "$ordered",
    collections.Counter: "$counter",
}
_FROM_ITEMS: dict[str | None, Callable[[Any], object]] = {tag: kind for kind, tag in (_LISTS | _DICTS).items()}


def encode(value: object, path: str, leaf: Leaf = lambda value, path: None, depth: int = 0) -> Json:
    """The JSON form of `value`. `leaf` returns a tagged object, or None for a value that it does not encode.

    Raises Unsupported, with the path, for a value without a safe form.
    """
    if depth > DEPTH_MAX:
        raise Unsupported(f"encode {path[:80]}…: nested deeper than {DEPTH_MAX}", hint="is there a cycle in it?")
    kind = type(value)
    if kind is dict:  # the most frequent type first, without a call of `leaf`
        return _encode_dict(cast("dict[Any, Any]", value), path, leaf, depth)
    if type(value) is int and value.bit_length() > INT_BITS_MAX:
        return {"$int": hex(value)}
    if value is None or kind in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": _float_text(value)}
    tagged = leaf(value, path)
    if tagged is not None:
        return tagged
    if isinstance(value, bytes | bytearray) and kind in (bytes, bytearray):
        return {f"${kind.__name__}": base64.b64encode(value).decode("ascii")}
    if kind in _TEXTS and (text := _exact_text(value)) is not None:
        return {_TEXTS[kind][0]: text}
    if isinstance(value, datetime.timedelta) and kind is datetime.timedelta:
        return {"$timedelta": [value.days, value.seconds, value.microseconds]}
    if isinstance(value, collections.deque) and kind is collections.deque:
        items = cast("collections.deque[object]", value)
        encoded = [encode(item, f"{path}[{index}]", leaf, depth + 1) for index, item in enumerate(items)]
        return {"$deque": [items.maxlen, encoded]}
    if isinstance(value, collections.defaultdict) and kind is collections.defaultdict:
        factory = cast("collections.defaultdict[Any, Any]", value).default_factory
        name = getattr(factory, "__name__", "")
        if factory is None or _FACTORIES.get(name) is factory:
            return {"$defaultdict": [name if factory else None, _pairs(value, path, leaf, depth)]}
    if type(value) is complex:
        return {"$complex": [_float_text(value.real), _float_text(value.imag)]}
    if kind in _LISTS and isinstance(value, list | tuple | set | frozenset):
        # sort sets: the same set must always give the same bytes
        elements = cast("Iterable[object]", value)
        items = sorted(elements, key=repr) if isinstance(value, set | frozenset) else list(elements)
        encoded = [encode(item, f"{path}[{index}]", leaf, depth + 1) for index, item in enumerate(items)]
        tag = _LISTS[kind]
        return encoded if tag is None else {tag: encoded}
    if kind in _DICTS and isinstance(value, dict):
        return _encode_dict(value, path, leaf, depth)
    raise Unsupported(
        f"encode {path}: {kind.__module__}.{kind.__qualname__} has no safe form in a checkpoint",
        hint="keep tensors, arrays, numbers, strings, bytes, dates, paths, lists, tuples, sets and dicts in the state, "
        "or give the object state_dict() and load_state_dict()",
    )


def _encode_dict(value: dict[Any, Any], path: str, leaf: Leaf, depth: int) -> Json:
    if type(value) is dict and are_plain_keys(value):
        return {key: encode(item, f"{path}.{key}", leaf, depth + 1) for key, item in value.items()}
    return {_DICTS[type(value)]: _pairs(value, path, leaf, depth)}


def _pairs(value: dict[Any, Any], path: str, leaf: Leaf, depth: int) -> list[Json]:
    return [
        [
            encode(key, f"{path}.<key {key!r}>", leaf, depth + 1),
            encode(item, f"{path}[{key!r}]", leaf, depth + 1),
        ]
        for key, item in value.items()
    ]


def _float_text(value: float) -> str:
    """The shortest text that gives back the same bits: a NaN with a sign or a payload in hex."""
    bits = struct.pack(">d", value)
    return f"0x{bits.hex()}" if math.isnan(value) and bits != _NAN else repr(value)


def _parse_float(text: Json) -> float:
    if not isinstance(text, str) or not text.startswith("0x"):
        return float(text)
    bits = bytes.fromhex(text[2:])
    if len(bits) != len(_NAN):
        raise ValueError(f"a float of {len(bits)} bytes")
    return struct.unpack(">d", bits)[0]


def _exact_text(value: object) -> str | None:
    """The text of a value of a type in _TEXTS. None when it does not give back all of it, as with a named time zone."""
    _, to_text, from_text = _TEXTS[type(value)]
    text = to_text(value)
    return text if repr(from_text(text)) == repr(value) else None


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
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
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
            return _parse_float(content)
        case "$int":
            return int(content, 16)
        case "$complex":
            return complex(_parse_float(content[0]), _parse_float(content[1]))
        case "$bytes":
            return base64.b64decode(content, validate=True)
        case "$bytearray":
            return bytearray(base64.b64decode(content, validate=True))
        case "$timedelta":
            days, seconds, microseconds = content
            return datetime.timedelta(days, seconds, microseconds)
        case "$deque":
            length_max, items = content
            return collections.deque((_decode(item, unleaf, depth + 1) for item in items), length_max)
        case "$defaultdict":
            name, pairs = content
            decoded = ((_decode(key, unleaf, depth + 1), _decode(item, unleaf, depth + 1)) for key, item in pairs)
            return collections.defaultdict(None if name is None else _FACTORIES[name], decoded)
        case _ if tag in _FROM_TEXT:
            return _FROM_TEXT[tag](content)
        case "$tuple" | "$set" | "$frozenset":
            return _FROM_ITEMS[tag](_decode(item, unleaf, depth + 1) for item in content)
        case "$dict" | "$ordered" | "$counter":
            decoded = {_decode(key, unleaf, depth + 1): _decode(item, unleaf, depth + 1) for key, item in content}
            return _FROM_ITEMS[tag](decoded)
        case _:
            return unleaf(tag, content)
