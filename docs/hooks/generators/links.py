"""Links of a page, as the site needs them.

The Markdown files are written so that their links work in the repository. The site holds docs/ only, so a link that
leaves docs/ becomes the page made from that file, or plain text. A link to a folder becomes its index page. A link to
something that does not exist stays as it is: the strict build reports it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[3]
DOCS = PurePosixPath("docs")

PAGE_OF = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "bench/README.md": "benchmarks.md",
    "docs/decisions": "decisions/index.md",
}
"""Files and folders of the repository that the site shows as another page."""

_FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def for_site(markdown: str, *, folder: str, page: str) -> str:
    """The page with its links as the site needs them.

    `folder` is where the Markdown file lies in the repository ("" for its root, "docs/guides"); `page` is its path in
    the site ("guides/data.md").
    """

    def replaced(match: re.Match[str]) -> str:
        picture, text, link = match.groups()
        path, hash_, anchor = link.partition("#")
        if not path or re.match(r"[a-z]+:", link):
            return match[0]
        target = os.path.normpath(PurePosixPath(folder, path))
        if target in PAGE_OF:
            inside = PAGE_OF[target]
        elif PurePosixPath(target).is_relative_to(DOCS):
            inside = PurePosixPath(target).relative_to(DOCS).as_posix()
        elif (ROOT / target).exists():
            return text
        else:
            return match[0]
        start = PurePosixPath(page).parent.as_posix()
        return f"{picture}[{text}]({os.path.relpath(inside, start)}{hash_}{anchor})"

    parts = _FENCED.split(markdown)
    return "".join(part if part.startswith("```") else _LINK.sub(replaced, part) for part in parts)
