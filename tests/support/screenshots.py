"""Makes the pictures of the status pages for the docs: `python -m tests.support.screenshots FOLDER`."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from tests.support.browser import chromium, tab_of
from tests.support.web_scene import RUN, trained_run


async def shoot(url: str, folder: Path, devtools: str) -> None:
    async with tab_of(devtools) as tab:
        for width in (1280, 390):
            for theme in ("light", "dark"):
                await tab.emulate(width=width, is_dark=theme == "dark")
                await tab.open(f"{url}/runs/{RUN}")
                shot = await tab.screenshot()
                await asyncio.to_thread((folder / f"status-{width}-{theme}.png").write_bytes, shot)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as root, trained_run(Path(root), step_s=0.2) as daemon, chromium() as devtools:
        asyncio.run(shoot(daemon.url, Path(sys.argv[1]), devtools))
