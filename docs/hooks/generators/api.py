"""What is public in the client, and whether a page of the reference documents it.

Public is each name of `tierd_client.__all__`, each class and function of `tierd_client.frameworks` that a page names,
and the members of these classes that do not begin with an underscore.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from generators.links import ROOT

if TYPE_CHECKING:
    import griffe

PAGES = ("reference/client.md", "reference/frameworks.md")
PACKAGE = "tierd_client"


def problems(texts: Mapping[str, str]) -> list[str]:
    """Public names that no page shows, names shown that do not exist, and public names without a docstring.

    `texts` maps each page of PAGES to its Markdown.
    """
    import griffe  # part of the docs extra: the names of the generated pages are needed without it

    package = griffe.load(PACKAGE, search_paths=[ROOT, ROOT / "client"], resolve_aliases=True, resolve_external=True)
    shown = [name for page in PAGES for name in re.findall(r"^::: ([\w.]+)$", texts[page], re.MULTILINE)]
    public = [f"{PACKAGE}.{name}" for name in package.exports or () if not str(name).startswith("_")]
    found = [f"{name} is public, and no page of the reference shows it" for name in public if name not in shown]
    for name in shown:
        try:
            value = package[name.removeprefix(f"{PACKAGE}.")]
        except KeyError:
            found.append(f"{name} is in the reference, and the code does not have it")
            continue
        value = value.final_target if value.is_alias else value
        found += [f"{missing} has no docstring" for missing in _undocumented(name, value, name in public)]
    return found


def _undocumented(name: str, value: griffe.Object, with_members: bool) -> Iterator[str]:
    if not value.docstring:
        yield name
    if with_members and value.is_class:
        for member, inner in value.members.items():
            is_callable = inner.is_function or (inner.is_attribute and "property" in inner.labels)
            if not member.startswith("_") and is_callable and not inner.docstring:
                yield f"{name}.{member}"
