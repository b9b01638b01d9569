"""Values of classes that a checkpoint cannot name: Enum members, dataclasses, named tuples, generators, own types.

A checkpoint holds the name and the content of such a value, and a restore never imports a class by a name. It takes the
class from the live value at the same place, or calls the state's own `decode`. All else is refused with the path.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import inspect
import json
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch

from tierd.errors import BadConfig, TierdError, Unsupported
from tierd.format import tagged
from tierd.format.tagged import Parts, Place
from tierd_client.state import generators
from tierd_client.state.tensors import as_bytes, local_part

Encode = Callable[[Any], tuple[str, Any] | None]
Decode = Callable[[str, Any], Any]

HALF_RESTORED = "the state is half restored: do not train with it; build it anew and restore again"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Objects:
    """What a state does with these values. `encode` and `decode` are the user's. `from_live`: a restore finds live
    values at the same places, so that Enum members, dataclasses and named tuples can be stored."""

    encode: Encode | None = None
    decode: Decode | None = None
    from_live: bool = True

    @classmethod
    def of(cls, encode: Encode | None, decode: Decode | None, *, from_live: bool) -> Objects:
        """Raises BadConfig when only one of the two is given."""
        if (encode is None) != (decode is None):
            raise BadConfig("make a state with encode= or decode= alone", hint="pass both: one is the other's inverse")
        return cls(encode=encode, decode=decode, from_live=from_live)

    def split(self, value: object, path: str) -> Parts | None:
        """The parts of a value that has no other form. None when it is refused; Unsupported says why."""
        if self.encode is not None and (own := self._encode(self.encode, value, path)) is not None:
            return own
        if (state := generators.state_of(value, path)) is not None:
            return Parts("$generator", generators.KINDS[type(value)], state)
        if not self.from_live:
            return None
        name = type(value).__qualname__
        if isinstance(value, enum.Enum):
            return Parts("$enum", name, _member(value, path))
        if _is_named_tuple(value):
            return Parts("$namedtuple", name, cast("Any", value)._asdict())
        if _is_dataclass(value):
            return Parts("$dataclass", name, _fields(value, path))
        return None

    @staticmethod
    def _encode(encode: Encode, value: object, path: str) -> Parts | None:
        try:
            encoded = encode(value)
            if encoded is None:
                return None
            tag, content = encoded
        except Exception as error:  # of any kind: it is the user's code
            raise Unsupported(f"encode {path}: encode= raised {type(error).__qualname__}: {error}") from error
        if type(tag) is not str or content is value:
            raise Unsupported(f"encode {path}: encode= must return (name, other value) or None", hint="name is a str")
        return Parts("$own", tag, content)


def _member(value: enum.Enum, path: str) -> str | int:
    """The name of a member, or the number of a combination of flags."""
    if type(value).__members__.get(value.name) is value:
        return value.name
    if isinstance(value, enum.Flag) and type(value.value) is int:
        return value.value
    raise Unsupported(f"encode {path}: {value!r} is not among the members of its class", hint="store its value")


def _is_named_tuple(value: object) -> bool:
    kind = type(value)
    return kind.__bases__ == (tuple,) and hasattr(kind, "_fields") and not getattr(value, "__dict__", None)


def _is_dataclass(value: object) -> bool:
    """Whether it is a dataclass that can be made empty and then filled. One that inherits from dict, for example, holds
    more than its fields."""
    return dataclasses.is_dataclass(value) and type(value).__new__ is object.__new__


def _fields(value: Any, path: str) -> dict[str, Any]:
    kind = type(value)
    names = [field.name for field in dataclasses.fields(value)]
    slots = {name for base in kind.__mro__ for name in getattr(base, "__slots__", ())} - {"__dict__", "__weakref__"}
    others = sorted((getattr(value, "__dict__", {}).keys() | slots) - set(names))
    missing = [name for name in names if not hasattr(value, name)]
    if others or missing:
        listed = ", ".join(others or missing)
        what = f"has {listed} beside its fields" if others else f"has no value of its field {listed}"
        raise Unsupported(f"encode {path}: this {kind.__qualname__} {what}", hint="make each attribute a field")
    properties = {name: inspect.getattr_static(kind, name, None) for name in names}
    read_only = [name for name, found in properties.items() if isinstance(found, property) and found.fset is None]
    if read_only:
        raise Unsupported(
            f"encode {path}: a restore could not set {', '.join(read_only)} of this {kind.__qualname__}, "
            "which is a property without a setter",
            hint="give the property a setter, or pass encode= and decode= to the state",
        )
    return {name: getattr(value, name) for name in names}


def _is_known_member(kind: type[enum.Enum], content: Any) -> bool:
    if isinstance(content, str):
        return content in kind.__members__
    try:
        flag = kind(content)
        return isinstance(flag, enum.Flag) and flag.value == content  # a boundary may drop bits
    except Exception:  # of any kind: _missing_ is the user's code
        return False


class Rebuilder:
    """Rebuilds the values of one restore. `check` is called for each while the restore is planned, `rebuild` when all
    tensors were read; only the latter changes live values. `device`: of new generators that were not on the CPU."""

    def __init__(self, objects: Objects, differences: list[str], device: torch.device) -> None:
        self._objects = objects
        self._differences = differences
        self._device = device
        self._generators: dict[int, tuple[object, dict[str, Any]]] = {}  # by id: the live one, the state that it got
        # By the ids of a live dataclass and of its restored value: (the live one, the content that it got, the value).
        # Both objects are kept, so that Python does not reuse their ids.
        self._dataclasses: dict[int, tuple[object, dict[str, Any], object]] = {}

    def check(self, parts: Parts, place: Place) -> None:
        """Adds a difference when the value cannot be rebuilt."""
        if difference := self._difference(parts, place.live):
            self._differences.append(f"{place.path}: {difference}")

    def _difference(self, parts: Parts, live: object) -> str:
        content, kind = parts.content, type(live)
        if parts.tag == "$own":
            return "" if self._objects.decode else f"the checkpoint holds a {parts.name!r} of encode=: pass decode="
        if parts.tag == "$generator":
            return generators.difference(parts.name, content, live, self._device)
        if kind.__qualname__ != parts.name or not self._objects.from_live:
            now = "nothing" if live is None else f"a {kind.__qualname__}"
            return (
                f"the checkpoint holds a {parts.name}, the state has {now} there; a restore takes the class from the "
                f"live value: put a {parts.name} there before the restore, or give encode= and decode="
            )
        match parts.tag:
            case "$enum" if isinstance(live, enum.Enum):
                is_known = _is_known_member(type(live), content)
                return "" if is_known else f"the checkpoint holds {parts.name}.{content}, which is no member now"
            case "$namedtuple" if _is_named_tuple(live):
                now = list(cast("Any", live)._fields)
            case "$dataclass" if _is_dataclass(live):
                now = [field.name for field in dataclasses.fields(cast("Any", live))]
            case _:
                return f"the checkpoint holds a {parts.name} of another kind"
        if now == list(content):
            return ""
        return f"the checkpoint holds a {parts.name} with {', '.join(content)}, now it has {', '.join(now)}"

    def rebuild(self, parts: Parts, place: Place) -> object:
        """The value. Generators and dataclasses that are not frozen get their state in place.

        Raises TierdError, never Corrupt: the checkpoint's bytes are those that were saved.
        """
        if parts.tag == "$own":
            assert self._objects.decode is not None  # `check` has refused it
            return self._run(place, "decode=", lambda decode=self._objects.decode: decode(parts.name, parts.content))
        return self._run(place, f"to make a {parts.name}", lambda: self._rebuild(parts, place))

    def _rebuild(self, parts: Parts, place: Place) -> object:
        content, live = parts.content, cast("Any", place.live)
        match parts.tag:
            case "$generator":
                return self._rebuild_generator(parts, place)
            case "$enum":
                kind = cast("type[enum.Enum]", type(live))
                return kind[content] if isinstance(content, str) else kind(content)
            case "$namedtuple":
                return type(live)._make(content.values())
            case _:
                return self._rebuild_dataclass(content, live)

    @staticmethod
    def _run(place: Place, what: str, make: Callable[[], object]) -> object:
        try:
            return make()
        except Exception as error:  # of any kind: it is the user's code
            raise TierdError(
                f"restore {place.path}: {what} raised {type(error).__qualname__}: {error}", hint=HALF_RESTORED
            ) from error

    def _rebuild_dataclass(self, content: dict[str, Any], live: Any) -> object:
        """If two places refer to one live dataclass and saved the same content, both get one object again. Otherwise
        the second place gets a new one."""
        known = self._dataclasses.get(id(live))
        if known is not None and _are_same(known[1], content):
            return known[2]
        is_new = type(live).__dataclass_params__.frozen or known is not None
        value = object.__new__(type(live)) if is_new else live
        for name, item in content.items():
            object.__setattr__(value, name, item)
        for key in (id(live), id(value)):
            self._dataclasses.setdefault(key, (live, content, value))
        return value

    def _rebuild_generator(self, parts: Parts, place: Place) -> object:
        """If two places refer to one live generator and saved the same state, both get it again. Otherwise the second
        place gets a new one."""
        state, live = parts.content, place.live
        if id(live) in self._generators:
            known, its_state = self._generators[id(live)]
            if its_state == state:
                return known
            live = None
        generator = generators.restore(parts.name, state, live, self._device)
        self._generators[id(generator)] = generator, state
        return generator


def _are_same(content: object, other: object) -> bool:
    try:
        return _form(content) == _form(other)
    except Unsupported:
        return False


def _form(content: object) -> str:
    """A text that two values share if they have the same types and bits. It names other objects by their identity."""

    def leaf(value: object, path: str) -> object:
        match value:
            case torch.Tensor():
                part = local_part(value.detach())
                raw = as_bytes(part.cpu().contiguous()).numpy().data
                form = [str(part.dtype), list(part.shape), str(part.device)]
            case np.ndarray() | np.generic():
                raw, form = np.ascontiguousarray(value).tobytes(), [value.dtype.str, list(value.shape)]
            case torch.dtype() | torch.device() | torch.Size():
                raw, form = b"", [repr(value)]
            case _:
                return None
        return [*form, hashlib.sha256(raw).hexdigest()]

    def parts(value: object, path: str) -> Parts:
        is_tuple = _is_named_tuple(value)
        return Parts("$object", str(id(type(value) if is_tuple else value)), list(value) if is_tuple else None)  # type: ignore[call-overload]

    return json.dumps(tagged.encode(content, "", leaf, parts))


def described(parts: Parts, place: Place) -> object:
    """The content of an object without its class, or the name of an Enum member, for exports."""
    del place
    return parts.content
