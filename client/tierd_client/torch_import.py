"""`python -m tierd_client.torch_import PATH`: the state in a file of `torch.save`, for `tierd import`.

The only place of tierd that reads a pickle, in a process of its own and only through `torch.load(weights_only=True)`,
which makes tensors, numbers, strings and containers, and refuses all else by name. The tensors stay in the file, which
is mapped. The other end of stdin and stdout is `tierd/cli/torch_import.py`; the messages are in
`tierd/format/import_messages.py`.
"""

from __future__ import annotations

import os
import re
import struct
import sys
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, cast

import torch

from tierd.errors import Corrupt, NotFound, TierdError, Unsupported
from tierd.format.import_messages import LENGTH, REQUEST, ImportedTensor, ImportReply, ImportRequest, Like
from tierd_client.state.encoding import Collector, Json
from tierd_client.state.objects import Objects
from tierd_client.state.optimizers import OptimizersSection
from tierd_client.state.sections import ModuleSection, ValueSection, capture_state_dict
from tierd_client.state.tensors import CapturedTensor, as_bytes, clean_names

SECTIONS = ("scheduler", "scaler", "ema", "dataloader")
"""Keys of a file that become sections of a TrainingState, if the checkpoint of --like has these sections."""

# APPNOTE.TXT 4.3.7: at byte 26 of the header before each entry the lengths of its name and of the extra field.
_LENGTHS_AT, _LENGTHS = 26, struct.Struct("<HH")
_GLOBAL = re.compile(r"(?:GLOBAL|class) ([\w.]+)")


def load(path: str) -> Any:
    """What the file holds. Raises Unsupported for what is not only data, Corrupt for a file that is damaged."""
    is_zip = zipfile.is_zipfile(path)
    try:
        if is_zip:
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
                if len(set(names)) != len(names):
                    raise Corrupt("two entries of the archive have one name", hint="save it again")
                if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                    raise Unsupported(
                        "its entries are compressed, and torch.save stores them as they are",
                        hint="torch.save(torch.load(FILE, weights_only=True), OTHER) does",
                    )
                damaged = archive.testzip()  # torch does not compare these checksums
            if damaged is not None:
                raise Corrupt(
                    f"its entry {damaged} does not have its checksum",
                    hint="was it copied whole? torch.serialization.set_crc32_options(False) writes none: save it again",
                )
        elif not _begins_as_pickle(path):
            raise Corrupt("it is not a file of torch.save", hint="was it copied whole?")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except TierdError:
        raise
    except MemoryError as error:
        raise TierdError("there is not enough memory") from error
    except Exception as error:  # torch raises whatever its parsers raise
        if type(error).__name__ == "UnpicklingError":
            raise _refusal(str(error)) from error
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise Corrupt(f"torch cannot read it: {lines[0]}", hint="was it copied whole?") from error


def check_storages(path: str, tensors: Sequence[CapturedTensor]) -> None:
    """torch maps the file, and does not compare the sizes of the storages with those of the entries in the archive.
    Raises Corrupt where a tensor would be read from beyond its entry."""
    if not zipfile.is_zipfile(path):
        return
    sizes: dict[int, int] = {}
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        for entry in archive.infolist():
            file.seek(entry.header_offset + _LENGTHS_AT)
            sizes[file.tell() + _LENGTHS.size + sum(_LENGTHS.unpack(file.read(_LENGTHS.size)))] = entry.file_size
    mappings = _mappings(path)
    for tensor in tensors:
        storage = tensor.tensor.untyped_storage()
        begin, size_bytes = storage.data_ptr(), storage.nbytes()
        offsets = [begin - low + at for low, high, at in mappings if low <= begin < high]
        if size_bytes and offsets and sizes.get(offsets[0]) != size_bytes:
            raise Corrupt(
                f"{tensor.name}: its storage has {size_bytes} bytes, and its entry in the archive "
                f"{sizes.get(offsets[0], 'begins elsewhere')}",
                hint="was it packed again by another program?",
            )


def _mappings(path: str) -> list[tuple[int, int, int]]:
    """(first address, the one after the last, offset in the file) of what is mapped of a file: proc_pid_maps(5)."""
    found: list[tuple[int, int, int]] = []
    inode, name = os.stat(path).st_ino, os.path.realpath(path)
    with open("/proc/self/maps") as maps:
        for line in maps:
            addresses, _, at, _, number, *names = line.rstrip("\n").split(maxsplit=5)
            if int(number) == inode or names == [name]:  # an overlay has other inodes than the files below it
                low, high = (int(address, 16) for address in addresses.split("-"))
                found.append((low, high, int(at, 16)))
    return found


def _begins_as_pickle(path: str) -> bool:
    """As files of torch before 1.6 do."""
    with open(path, "rb") as file:
        return file.read(2) == b"\x80\2"


def _refusal(text: str) -> Unsupported:
    if (found := _GLOBAL.search(text)) is not None:
        return Unsupported(
            f"its pickle names {found[1]}, and torch.load(weights_only=True) refuses that: it may run code",
            hint="load it where you trust it, and save only tensors, numbers, strings and containers of these; "
            "`tierd adopt` takes the file as it is",
        )
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason = next((line for line in lines if line.startswith("Unsupported")), lines[-1] if lines else "no reason given")
    return Unsupported(
        f"torch.load(weights_only=True) refuses it: {reason}", hint="save it again with torch.save and its defaults"
    )


def capture(value: Any, model: str | None, like: Like | None = None) -> tuple[dict[str, Json], list[CapturedTensor]]:
    """The state tree, and the tensors in the order of the reply. `model`: the key of the model's state dict.

    A file that is a state dict of tensors is a model. All else is what a DictState holds: a section for each key. With
    `model`, it is what a TrainingState holds, with the other keys in `extra`. With `like` too, the optimizer's state
    has the names of its parameters, and the keys of SECTIONS that `like` has are sections. Raises Unsupported, naming
    what has no safe form or does not fit `like`, and NotFound if there is no such key."""
    if not isinstance(value, Mapping):
        raise Unsupported(f"it holds a {type(value).__qualname__}, and no dict", hint="save a dict with it")
    entries = cast("Mapping[Any, Any]", value)
    if strange := [key for key in entries if not isinstance(key, str)]:
        raise Unsupported(f"its key {strange[0]!r} is no string", hint="save a dict whose keys are strings")
    if not entries:
        raise Unsupported("it holds an empty dict")
    into = Collector(objects=Objects.of(None, None, from_live=False))
    tree: dict[str, Json] = {}
    if model is not None:
        if model not in entries:
            raise NotFound(f"it has no key {model!r}", hint=f"its keys are {', '.join(list(entries)[:20])}")
        tree["model"] = _model(entries[model], f"its entry {model!r}", into)
        others = {key: item for key, item in entries.items() if key != model}
        if like is not None:
            tree["optimizer"] = _optimizer(pop_optimizer(others), like, into)
            for key in [key for key in others if key in SECTIONS and key in like.sections]:
                tree[key] = _like_section(key, others.pop(key), like.sections[key], into)
        named = {f"extra.{key}": item for key, item in others.items()}
    elif all(isinstance(item, torch.Tensor) for item in entries.values()):
        tree["model"] = _model(entries, "it", into)
        named = {}
    else:
        named = dict(entries)
    for name, item in named.items():
        tree[name] = {"kind": ValueSection.kind, "suffix": "", "value": into.encode(item, name)}
    return tree, into.tensors


def pop_optimizer(entries: dict[str, Any]) -> Any:
    """The state dict of the optimizer, which is removed. Lightning puts it into a list. Raises Unsupported unless
    there is one."""
    found = {
        (key, index): each
        for key, item in entries.items()
        for index, each in enumerate(cast("list[Any]", item) if isinstance(item, list) else [item])
        if isinstance(each, Mapping) and {"state", "param_groups"} <= {*cast("Mapping[Any, Any]", each)}
    }
    keys = [key for key, _ in found]
    if not keys:
        raise Unsupported(
            "no entry of it is the state dict of an optimizer", hint="leave --like out: it names an optimizer's state"
        )
    if len(keys) > 1:
        raise Unsupported(
            f"it has the state dicts of {len(keys)} optimizers: {', '.join(keys)}",
            hint="--like is for one optimizer; load the file in the training, and take a snapshot",
        )
    del entries[keys[0]]
    return next(iter(found.values()))


def _optimizer(saved: Mapping[str, Any], like: Like, into: Collector) -> Json:
    """As tierd stores an optimizer: its parameters by name, and not by number as torch does."""
    states, members = saved["state"], saved["param_groups"]
    if not isinstance(members, list) or not all(_is_group(each) for each in cast("list[Any]", members)):
        raise Unsupported("its optimizer has groups of parameters that are not as torch writes them")
    members = cast("list[dict[str, Any]]", members)
    if len(members) != len(like.groups):
        raise Unsupported(f"its optimizer has {len(members)} groups, and the checkpoint's has {len(like.groups)}")
    groups: list[Json] = []
    names: dict[int, str] = {}
    defaults = set(like.defaults)
    for index, (group, expected) in enumerate(zip(members, like.groups, strict=True)):
        ordered = _names(index, group, expected.params)
        if len({*group["params"]} - names.keys()) != len(ordered):
            raise Unsupported(f"group {index} of its optimizer has a parameter twice, or one of another group")
        names |= zip(group["params"], ordered, strict=True)
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        removed, added = defaults - options.keys(), options.keys() - {*expected.options}
        if removed and added:  # a newer torch only adds options
            raise Unsupported(
                f"it is another kind of optimizer: its groups have {', '.join(sorted(added))}, and the checkpoint's "
                f"{', '.join(sorted(removed))}"
            )
        defaults &= options.keys()
        encoded = into.encode(options, f"optimizer.param_groups.{index}")
        groups.append({"params": ordered, "options": encoded})
    state: dict[str, Json] = {}
    for number, entries in (cast("Mapping[Any, Any]", states) if isinstance(states, Mapping) else {None: {}}).items():
        if type(number) is not int or number not in names or not _has_text_keys(entries):
            raise Unsupported(f"its optimizer has state of {number!r}, which is no parameter in its groups")
        name = names[number]
        state[name] = into.encode(entries, f"optimizer.state.{name}", home=torch.device("cpu"))
    value = [{"defaults": sorted(defaults), "foreign": [], "groups": groups, "state": state}]
    return {"kind": OptimizersSection.kind, "suffix": "", "value": value}


def _is_group(value: Any) -> bool:
    numbers = value.get("params") if _has_text_keys(value) else None
    return isinstance(numbers, list) and all(type(each) is int for each in cast("list[Any]", numbers))


def _has_text_keys(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in cast("dict[Any, Any]", value))


def _names(index: int, group: Mapping[str, Any], expected: list[str]) -> list[str]:
    """The names of a group's parameters, in its order: those in the file where it has some, else those `expected`."""
    if (count := len(group["params"])) != len(expected):
        raise Unsupported(
            f"group {index} of its optimizer has {count} parameters, and the checkpoint's has {len(expected)}"
        )
    if (given := group.get("param_names")) is None:
        return expected
    if not isinstance(given, list) or not all(isinstance(each, str) for each in cast("list[Any]", given)):
        raise Unsupported(f"the param_names of group {index} of its optimizer are no list of names")
    cleaned = clean_names(cast("list[str]", given))
    names = [cleaned[name] for name in cast("list[str]", given)]
    if strange := sorted({*names} - {*expected}):
        raise Unsupported(f"group {index} has the parameter {strange[0]}, and the checkpoint's has not")
    if len(names) != count or len({*names}) != count:
        raise Unsupported(f"group {index} of its optimizer does not name each of its parameters once")
    return names


def _like_section(key: str, value: Any, kind: str, into: Collector) -> Json:
    if kind == ModuleSection.kind:
        return _model(value, f"its entry {key!r}", into, key)
    return {"kind": kind, "suffix": "", "value": into.encode(value, key)}


def _model(state: Any, what: str, into: Collector, prefix: str = "model") -> Json:
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in cast("Mapping[Any, Any]", state)):
        raise Unsupported(f"{what} is no state dict of a model", hint="--model names the key of one")
    value = capture_state_dict(cast("Mapping[str, Any]", state), prefix, into)
    return {"kind": ModuleSection.kind, "suffix": "", "value": value}


def serve(tensors: Sequence[CapturedTensor], requests: BinaryIO, answers: BinaryIO) -> None:
    """Answers until stdin ends."""
    index, content = -1, memoryview(b"")
    while len(raw := requests.read(REQUEST.size)) == REQUEST.size:
        wanted, offset, length = REQUEST.unpack(raw)
        if wanted != index:
            whole = tensors[wanted].tensor.resolve_conj().resolve_neg().contiguous()
            index, content = wanted, memoryview(as_bytes(whole).numpy().data)
        answers.write(content[offset : offset + length])
        answers.flush()


def main(path: str, requests: BinaryIO, answers: BinaryIO) -> None:
    tensors: Sequence[CapturedTensor] = ()
    asked = ImportRequest.read(requests)
    try:
        tree, tensors = capture(load(path), asked.model, asked.like)
        check_storages(path, tensors)
        described = [
            ImportedTensor(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, torch_dtype=tensor.torch_dtype)
            for tensor in tensors
        ]
        reply = ImportReply(tree=tree, tensors=described)
    except TierdError as error:
        reply = ImportReply(error_kind=error.kind, message=error.message, hint=error.hint)
    except Exception as error:  # torch raises whatever its parsers raise; the command is to say what
        reply = ImportReply(error_kind=TierdError.kind, message=f"{type(error).__qualname__}: {error}")
    encoded = reply.encode()
    answers.write(LENGTH.pack(len(encoded)) + encoded)
    answers.flush()
    serve(tensors, requests, answers)


if __name__ == "__main__":
    own_stdout = os.dup(1)
    os.dup2(2, 1)  # nothing else may write between the answers
    with open(own_stdout, "wb") as output:
        main(sys.argv[1], sys.stdin.buffer, output)
