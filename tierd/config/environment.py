"""The environment variables of tierd: those that set a key of the config, and the names that nothing reads.

`TIERD_SECTION_KEY` overrides a scalar key. A name that begins with TIERD_ and that nothing reads is most likely
misspelt, so the daemon refuses to start with it. Kubernetes sets such names in every pod of a namespace with a Service
called tierd or tierd-something; they are ignored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, get_origin

import msgspec

from tierd import failpoints
from tierd.config.sections import Config
from tierd.errors import BadConfig
from tierd.format import run_secret

PREFIX = "TIERD_"
KEY_FILE = "TIERD_KEY_FILE"
SWITCHES = "SLURM_TOPOLOGY_ADDR"
NODE = "SLURM_NODEID"
DOMAIN = "TIERD_PEERS_DOMAIN"
OTHERS = (
    "TIERD_CONFIG",
    KEY_FILE,
    "TIERD_TRACEBACK",
    failpoints.VARIABLE,
    # of trainers and commands
    run_secret.VARIABLE,
    "TIERD_SOCKET",
    "TIERD_RESUME",
    "TIERD_DEADLINE",
    "TIERD_STOP_FILE",
    # of the tests of tierd
    "TIERD_SIMULATION_SEEDS",
    "TIERD_TEST_CGROUP",
)
"""Variables that are no key of the config."""

# https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
_SERVICE = re.compile(
    r"TIERD_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?)"
)
_SERVICE_PORT = re.compile(r"TIERD_(\w+_)?PORT=(tcp|udp|sctp)://.*")


def _keys(struct: type[msgspec.Struct], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(keys, type) of every key that is not a table."""
    for field in msgspec.structs.fields(struct):
        keys = (*above, field.encode_name)
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from _keys(field.type, keys)
        else:
            yield keys, field.type


def _variable(keys: tuple[str, ...]) -> str:
    return PREFIX + "_".join(keys).upper()


SCALARS = {_variable(keys): (keys, kind) for keys, kind in _keys(Config) if get_origin(kind) is not list}
LISTS = {_variable(keys): ".".join(keys) for keys, kind in _keys(Config) if get_origin(kind) is list}
"""The keys of lists, such as cold, watch and listen.hosts, by the variable that would set them."""


def apply(tree: dict[str, Any], environ: Mapping[str, str]) -> None:
    """TIERD_HOT_PATH sets hot.path, TIERD_LIFECYCLE_HOT_KEEP_LAST lifecycle.hot.keep_last, and so on. TIERD_KEY_FILE is
    short for TIERD_SECURITY_KEY_FILE. Slurm tells the switches above a node: "s1.s7.node3" is below s7, which is below
    s1; and the number of the node, from 0. Raises BadConfig for a value of the wrong type."""
    if KEY_FILE in environ:
        environ = {"TIERD_SECURITY_KEY_FILE": environ[KEY_FILE], **environ}
    peers = tree.get("peers", {})
    has_domain = not isinstance(peers, dict) or peers.get("domain")  # load() refuses what is not a table
    if (switches := environ.get(SWITCHES, "").rpartition(".")[0]) and not has_domain:
        environ = {DOMAIN: switches, **environ}
    _number_nodes(tree.get("watch"), environ.get(NODE, ""))
    for name, (keys, kind) in SCALARS.items():
        raw = environ.get(name)
        if raw is None:
            continue
        section: Any = tree
        for key in keys[:-1]:
            section = section.setdefault(key, {}) if isinstance(section, dict) else None
        if not isinstance(section, dict):
            continue  # not a table in the file: load() refuses it
        try:
            section[keys[-1]] = msgspec.convert(raw, kind, strict=False)
        except (msgspec.ValidationError, UnicodeError) as error:
            raise BadConfig(f"read ${name}={raw!r}: {error}", hint=f"it sets {'.'.join(keys)}") from error


def _number_nodes(watches: Any, number: str) -> None:
    """Of the folders in which each node writes its own files. load() refuses what is not a list of tables."""
    for watch in watches if isinstance(watches, list) and number.isascii() and number.isdecimal() else ():
        if isinstance(watch, dict) and watch.get("nodes", 1) != 1 and "node" not in watch:
            watch["node"] = int(number)


def overriding(environ: Mapping[str, str]) -> list[str]:
    """The variables that set a key of the config."""
    return [name for name in environ if name in SCALARS or name == KEY_FILE]


def check_names(environ: Mapping[str, str] = os.environ) -> None:
    """Raises BadConfig if the environment has names that nothing reads."""
    if unknown := unknown_names(environ):
        raise BadConfig(
            f"read the environment: {'; '.join(unknown)}",
            hint="TIERD_SECTION_KEY sets a key of the config; a variable of your own needs another prefix than TIERD_",
        )


def unknown_names(environ: Mapping[str, str] = os.environ) -> list[str]:
    """What is wrong with each name that begins with TIERD_ and that nothing reads. Values are not shown: one may be a
    secret under a misspelt name."""
    return [
        _explained(name)
        for name, value in sorted(environ.items())
        if name.startswith(PREFIX) and name not in (*SCALARS, *OTHERS) and not _is_of_a_service(name, value)
    ]


def _explained(name: str) -> str:
    for variable, key in LISTS.items():
        if name == variable or ("." not in key and name.startswith(f"{variable}_")):
            return f"nothing reads ${name}: only the config file sets {key}"
    known = [each.removeprefix(PREFIX) for each in (*SCALARS, *OTHERS)]
    short = name.removeprefix(PREFIX).upper()
    closest = [each for each in known if each.endswith(f"_{short}")] or get_close_matches(short, known, 1, 0.7)
    meant = " or ".join(PREFIX + each for each in closest)
    return f"nothing reads ${name}{f'; did you mean {meant}?' if meant else ''}"


def _is_of_a_service(name: str, value: str) -> bool:
    return bool(_SERVICE.fullmatch(name) or _SERVICE_PORT.fullmatch(f"{name}={value}"))
