"""The hook of MkDocs: adds the generated pages, adapts links, and warns of everything public that is undocumented.

`make docs` builds strictly, so a warning fails the build.
"""

from __future__ import annotations

import logging
from pathlib import PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

from generators import links, pages

log = logging.getLogger("mkdocs.tierd")


def on_files(files: Files, config: Any) -> Files:
    for path, make in pages.PAGES.items():
        files.append(File.generated(config, path, content=make()))
    for problem in pages.problems():
        log.warning("%s", problem)
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    source = page.file.src_uri
    if source in pages.PAGES:
        return markdown
    return links.for_site(markdown, folder=(links.DOCS / PurePosixPath(source).parent).as_posix(), page=source)
