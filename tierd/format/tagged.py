"""Tagged JSON: Python values other than tensors as JSON, from which the same types are decoded. No pickle.

Plain JSON values are unchanged. Every other value is an object with one key that begins with '$': `{"$tuple": [...]}`,
`{"$float": "nan"}`, `{"$bytes": base64}`, `{"$dict": [[key, value], ...]}`. The caller encodes tensors and arrays:
`encode` calls `leaf` for every value that is neither a plain dict nor plain JSON, `decode` calls `unleaf` for every
unknown tag. Values of other classes are split into parts by the caller, and rebuilt by it:
`{"$dataclass": [name, {...}]}`, and so `$enum`, `$namedtuple`, `$generator` and `$own`.
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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, NamedTuple, cast

from tierd.errors import Corrupt, Unsupported

DEPTH_MAX = 64  # deeper state has a cycle, or is forged
INT_BITS_MAX = 4096  # of an integer in decimal: Python's JSON reads at most 4300 digits
REPEATED_MAX = 500_000  # values of containers that occur again: encoding them takes about a second
Json = Any
Leaf = Callable[[object, str], "Json | None"]
Unleaf = Callable[[str, Json], object]


class Parts(NamedTuple):
    """A value of a class that has no form here, split into a name, of the class for example, and content that has."""

    tag: str
    name: str
    content: Any


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a decoded value: its path in the state, and the value that is there now."""

    path: str
    live: object

    def item(self, key: object) -> Place:
        """The place of the item `key` of a container, or of a field of an object."""
        live: object = None
        if isinstance(self.live, Mapping):
            live = cast("Mapping[object, object]", self.live).get(key)
        elif isinstance(key, int) and isinstance(self.live, list | tuple | collections.deque):
            items = cast("Sequence[object]", self.live)
            live = items[key] if key < len(items) else None
        elif isinstance(key, str) and (is_dataclass(self.live) or hasattr(type(self.live), "_fields")):
            live = getattr(self.live, key, None)
        return Place(f"{self.path}.{key}" if isinstance(key, str) else f"{self.path}[{key!r}]", live)

    def element(self) -> Place:
        """The place of a key or of an element of a set, which correspond to no live value."""
        return Place(f"{self.path}.<key>", None)


SplitParts = Callable[[object, str], Parts | None]
Rebuild = Callable[[Parts, Place], object]

_FROM_LIVE = frozenset({"$enum", "$dataclass", "$namedtuple"})
"""Values that are rebuilt with the class of the live value at the same place."""

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


def encode(value: object, path: str, leaf: Leaf = lambda value, path: None, parts: SplitParts | None = None) -> Json:
    """The JSON form of `value`. `leaf` returns a tagged object, or None for a value that it does not encode; `parts`
    is called for values that have no form here, and returns None for those that it refuses too.

    Raises Unsupported, with the path, for a value without a safe form.
    """
    return _Encoder(leaf, parts).encode(value, path, 0)


class _Encoder:
    """Encodes one value, and counts how often it meets a container again: a list that holds another one twice, which
    holds another one twice, has few lists and very many paths."""

    __slots__ = ("_containers", "_is_element", "_leaf", "_parts", "_repeated")

    def __init__(self, leaf: Leaf, parts: SplitParts | None) -> None:
        self._leaf = leaf
        self._parts = parts
        self._containers: dict[int, object] = {}  # by id; keeps them alive, so that no id is used again
        self._repeated = 0
        self._is_element = False  # inside of a key or of an element of a set

    def encode(self, value: object, path: str, depth: int) -> Json:
        if depth > DEPTH_MAX:
            raise Unsupported(f"encode {path[:80]}…: nested deeper than {DEPTH_MAX}", hint="is there a cycle in it?")
        kind = type(value)
        if kind is dict:  # the most frequent type first, without a call of `leaf`
            return self._encode_dict(cast("dict[Any, Any]", value), path, depth)
        if type(value) is int and value.bit_length() > INT_BITS_MAX:
            return {"$int": hex(value)}
        if value is None or kind in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"$float": _float_text(value)}
        tagged = self._leaf(value, path)
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
            return {"$deque": [items.maxlen, self._encode_items(items, items, path, depth)]}
        if isinstance(value, collections.defaultdict) and kind is collections.defaultdict:
            factory = cast("collections.defaultdict[Any, Any]", value).default_factory
            name = getattr(factory, "__name__", "")
            if factory is None or _FACTORIES.get(name) is factory:
                return {"$defaultdict": [name if factory else None, self._pairs(value, path, depth)]}
        if type(value) is complex:
            return {"$complex": [_float_text(value.real), _float_text(value.imag)]}
        if kind in _LISTS and isinstance(value, list | tuple | set | frozenset):
            # sort sets: the same set must always give the same bytes
            elements = cast("Collection[object]", value)
            if isinstance(value, set | frozenset):
                encoded = self._as_element(self._encode_items, elements, sorted(elements, key=repr), path, depth)
            else:
                encoded = self._encode_items(elements, elements, path, depth)
            tag = _LISTS[kind]
            return encoded if tag is None else {tag: encoded}
        if kind in _DICTS and isinstance(value, dict):
            return self._encode_dict(value, path, depth)
        parts = self._parts(value, path) if self._parts is not None else None
        if parts is not None:
            if self._is_element and parts.tag in _FROM_LIVE:
                raise Unsupported(
                    f"encode {path}: a restore takes the class of a {parts.name} from the live value at the same "
                    "place, which a key of a dict or an element of a set does not have",
                    hint="use its name or its number there, or pass encode= and decode= to the state",
                )
            self._enter(value, 1, path)
            return {parts.tag: [parts.name, self.encode(parts.content, path, depth + 1)]}
        raise Unsupported(
            f"encode {path}: {kind.__module__}.{kind.__qualname__} has no safe form in a checkpoint",
            hint="keep tensors, arrays, numbers, strings, bytes, dates, paths, lists, tuples, sets and dicts in the "
            "state, give the object state_dict() and load_state_dict(), or pass encode= and decode= to the state",
        )

    def _enter(self, container: object, size: int, path: str) -> None:
        if id(container) not in self._containers:
            self._containers[id(container)] = container
            return
        self._repeated += 1 + size
        if self._repeated > REPEATED_MAX:
            raise Unsupported(
                f"encode {path[:80]}…: containers that occur several times in it would repeat more than "
                f"{REPEATED_MAX} values",
                hint="store a container once, and refer to it by a key",
            )

    def _as_element(self, encode: Callable[..., Json], *arguments: Any) -> Json:
        was_element, self._is_element = self._is_element, True
        encoded = encode(*arguments)
        self._is_element = was_element
        return encoded

    def _encode_items(
        self, container: Collection[object], items: Iterable[object], path: str, depth: int
    ) -> list[Json]:
        self._enter(container, len(container), path)
        return [self.encode(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(items)]

    def _encode_dict(self, value: dict[Any, Any], path: str, depth: int) -> Json:
        if type(value) is dict and are_plain_keys(value):
            self._enter(value, len(value), path)
            return {key: self.encode(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
        return {_DICTS[type(value)]: self._pairs(value, path, depth)}

    def _pairs(self, value: dict[Any, Any], path: str, depth: int) -> list[Json]:
        self._enter(value, len(value), path)
        return [
            [
                self._as_element(self.encode, key, f"{path}.<key {key!r}>", depth + 1),
                self.encode(item, f"{path}[{key!r}]", depth + 1),
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


def decode(
    value: Json, unleaf: Unleaf = _no_leaf, rebuild: Rebuild | None = None, place: Place = Place("the value", None)
) -> Any:
    """The inverse of `encode`. `unleaf` returns the value of an unknown tag, `rebuild` a value from its parts; it is
    given the live value at the same place below `place`.

    Raises Corrupt for JSON that `encode` does not write.
    """
    try:
        return _Decoder(unleaf, rebuild, place).decode(value, None, 0)
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise Corrupt(f"decode tagged JSON: {error}") from error


_Keys = tuple["_Keys", object] | None
"""The keys from the whole value to one inside of it: (those of its container, its own key). None for the whole."""

_ELEMENT = object()
"""The key of what corresponds to no live value."""


class _Decoder:
    """Decodes one value. It makes a `Place` only for `rebuild`: a state has thousands of values, and most need none."""

    __slots__ = ("_rebuild", "_root", "_unleaf")

    def __init__(self, unleaf: Unleaf, rebuild: Rebuild | None, root: Place) -> None:
        self._unleaf = unleaf
        self._rebuild = rebuild
        self._root = root

    def _place(self, keys: _Keys) -> Place:
        if keys is None:
            return self._root
        container, key = keys
        place = self._place(container)
        return place.element() if key is _ELEMENT else place.item(key)

    def decode(self, value: Json, keys: _Keys, depth: int) -> Any:
        if depth > 2 * DEPTH_MAX:
            raise ValueError(f"nested deeper than {2 * DEPTH_MAX}")
        if isinstance(value, list):
            return self._items(value, keys, depth)
        if not isinstance(value, dict):
            return value
        if len(value) == 1:
            ((tag, content),) = value.items()
            if tag.startswith("$"):
                return self._decode_tag(tag, content, keys, depth)
        return {key: self.decode(item, (keys, key), depth + 1) for key, item in value.items()}

    def _items(self, items: Json, keys: _Keys, depth: int) -> list[Any]:
        return [self.decode(item, (keys, index), depth + 1) for index, item in enumerate(items)]

    def _unordered(self, items: Json, keys: _Keys, depth: int) -> list[Any]:
        return [self.decode(item, (keys, _ELEMENT), depth + 1) for item in items]

    def _pairs(self, pairs: Json, keys: _Keys, depth: int) -> dict[Any, Any]:
        decoded: dict[Any, Any] = {}
        for encoded_key, item in pairs:
            key = self.decode(encoded_key, (keys, _ELEMENT), depth + 1)
            decoded[key] = self.decode(item, (keys, key), depth + 1)
        return decoded

    def _decode_tag(self, tag: str, content: Json, keys: _Keys, depth: int) -> Any:
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
                return collections.deque(self._items(items, keys, depth), length_max)
            case "$defaultdict":
                name, pairs = content
                factory = None if name is None else _FACTORIES[name]
                return collections.defaultdict(factory, self._pairs(pairs, keys, depth))
            case _ if tag in _FROM_TEXT:
                return _FROM_TEXT[tag](content)
            case "$tuple":
                return tuple(self._items(content, keys, depth))
            case "$set" | "$frozenset":
                return _FROM_ITEMS[tag](self._unordered(content, keys, depth))
            case "$dict" | "$ordered" | "$counter":
                return _FROM_ITEMS[tag](self._pairs(content, keys, depth))
            case "$enum" | "$dataclass" | "$namedtuple" | "$generator" | "$own" if self._rebuild is not None:
                name, parts = content
                place = self._place(keys)
                return self._rebuild(Parts(tag, str(name), self.decode(parts, keys, depth + 1)), place)
            case _:
                return self._unleaf(tag, content)
