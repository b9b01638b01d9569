"""Every generated page of the site, and everything public that lacks a description."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from generators import api, cli, config, dcp_tests, decisions, exactness, links, metrics, sources


def _copy(name: str) -> Callable[[], str]:
    """The page that shows a Markdown file from outside docs/."""

    def page() -> str:
        text = (links.ROOT / name).read_text(encoding="utf-8")
        return links.for_site(text, folder=name.rpartition("/")[0], page=links.PAGE_OF[name])

    return page


PAGES: dict[str, Callable[[], str]] = {
    "index.md": _copy("README.md"),
    "changelog.md": _copy("CHANGELOG.md"),
    "benchmarks.md": _copy("bench/README.md"),
    "decisions/index.md": decisions.page,
    "reference/cli.md": cli.page,
    "reference/config.md": config.page,
    "reference/dcp-tests.md": dcp_tests.page,
    "reference/exactness.md": exactness.page,
    "reference/metrics.md": metrics.page,
    "reference/source-map.md": sources.page,
}
"""Path in the site, and the function that makes its Markdown."""


def problems() -> Iterator[str]:
    """One sentence for each public name, option, key or metric that the reference does not describe."""
    for name in [*cli.undocumented(), *config.undocumented(), *metrics.undocumented()]:
        yield f"{name} is public and has no description"
    yield from api.problems({page: (links.ROOT / "docs" / page).read_text(encoding="utf-8") for page in api.PAGES})
