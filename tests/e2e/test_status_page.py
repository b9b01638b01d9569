"""The status pages of a real daemon after a real training, in a real Chromium."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import Browser, axe_core, chromium, needs_browser, tab_of
from tests.support.daemon import Daemon
from tests.support.processes import PYTHON
from tests.support.web_scene import LAST, MILESTONE, RUN, trained_run
from tests.support.wire_peer import Peer
from tierd.format import wire

TAB = ("Tab", 9)
EVERY = 3  # steps

pytestmark = needs_browser


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, warm_program: str) -> Iterator[Daemon]:
    with trained_run(tmp_path_factory.mktemp("scene"), every=EVERY, environ={PYTHON: warm_program}) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def devtools() -> Iterator[str]:
    with chromium() as url:
        yield url


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return axe_core(tmp_path_factory.mktemp("axe"))


def paths(daemon: Daemon) -> list[str]:
    return ["/", f"/runs/{RUN}", f"/runs/{RUN}/{LAST:012}-g0002", "/runs/none"]


async def text_of(tab: Browser, selector: str) -> str:
    return await tab.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")


async def test_pages_lead_to_each_other_and_load_nothing_from_elsewhere(daemon: Daemon, devtools: str) -> None:
    async with tab_of(devtools) as tab:
        await tab.open(f"{daemon.url}/")
        assert f"{LAST}" in await text_of(tab, f"[id='run-{RUN}']")
        await tab.evaluate(f"document.querySelector('a[href=\"/runs/{RUN}\"]').click()")
        await tab.wait(f"document.title == 'run {RUN}'")
        await tab.evaluate("document.querySelector('#checkpoints a').click()")
        await tab.wait(f"document.title == 'step {LAST} of {RUN}'")
        assert f"tierd restore --run {RUN} --step {LAST} --generation 2" in await text_of(tab, "#about")
        assert {url.split("/")[2] for url in tab.requests if not url.startswith("data:")} == {
            daemon.url.removeprefix("http://")
        }
        assert tab.errors == []


async def test_picture_shows_tiers_the_milestone_the_unhealthy_step_and_the_branch(
    daemon: Daemon, devtools: str
) -> None:
    async with tab_of(devtools) as tab:
        await tab.open(f"{daemon.url}/runs/{RUN}")
        titles = await tab.evaluate("[...document.querySelectorAll('#timeline title')].map(each => each.textContent)")
        assert f"step {MILESTONE}, generation 1: milestone best" in titles
        assert f"step {LAST}, generation 2: checkpoint" in titles
        assert any(title.endswith(": unhealthy") for title in titles)
        assert await tab.evaluate("document.querySelectorAll('#timeline polyline.branch').length") == 2
        label = await tab.evaluate("document.querySelector('#timeline svg').getAttribute('aria-label')")
        assert "in hot" in label
        assert "in region-b" in label


async def test_page_follows_the_daemon_without_a_reload_and_keeps_the_focus(tmp_path: Path, devtools: str) -> None:
    def save(peer: Peer, step: int) -> None:
        peer.seal(step % 2, step, b"state")
        assert peer.hear(wire.Persisted).step == step

    async with tab_of(devtools) as tab:
        with Daemon(tmp_path) as daemon, Peer(daemon.socket) as peer:
            peer.greet("run")
            peer.attach(0)
            peer.attach(1)
            save(peer, 111)
            await tab.hurry(5)
            await tab.open(f"{daemon.url}/")
            await tab.evaluate("window.isSame = true")
            await tab.evaluate("document.querySelector('#tiers .scroll').focus()")
            save(peer, 222)
            await tab.wait("document.querySelector('#run-run').textContent.includes('222')")
            assert await tab.evaluate("window.isSame") is True
            assert await tab.evaluate("document.activeElement.getAttribute('aria-label')") == "Table: Tiers"
            daemon.signal(signal.SIGSTOP)
            try:
                await tab.wait("!document.getElementById('silent').hidden")
            finally:
                daemon.signal(signal.SIGCONT)
            await tab.wait("document.getElementById('silent').hidden")


async def test_page_is_used_by_keyboard(daemon: Daemon, devtools: str) -> None:
    async with tab_of(devtools) as tab:
        await tab.open(f"{daemon.url}/")
        await tab.press(*TAB)
        assert await tab.evaluate("document.activeElement.textContent") == "Skip to the content"
        reached: list[str] = []
        for _ in range(8):
            await tab.press(*TAB)
            reached.append(await tab.evaluate("document.activeElement.textContent.trim()"))
        assert RUN in reached


@pytest.mark.parametrize("width", [1280, 390])
async def test_nothing_is_cut_off_and_axe_core_finds_nothing(
    daemon: Daemon, devtools: str, axe: str, width: int
) -> None:
    async with tab_of(devtools) as tab:
        for path in paths(daemon):
            await tab.emulate(width=width)
            await tab.open(f"{daemon.url}{path}")
            await tab.evaluate(f"{axe}; true")
            for is_dark in (False, True):
                await tab.emulate(width=width, is_dark=is_dark)
                assert await tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
                found = await tab.evaluate(
                    "axe.run().then(all => all.violations.map(each => each.id + ': ' + each.nodes[0].html))"
                )
                assert found == [], path
