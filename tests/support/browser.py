"""A real headless Chromium, steered over the DevTools protocol.

https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.waiting import wait_until

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars", "--remote-debugging-port=0"),
)
DEADLINE_S = 60.0
PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)
needs_browser = pytest.mark.skipif(PROGRAM is None, reason=f"no browser: none of {', '.join(NAMES)} is installed")


class Browser:
    """One tab. `errors`: what its console said at the level of an error, and exceptions of scripts. `requests`: the
    URLs that it has asked for."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.errors: list[str] = []
        self.requests: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._hear()
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                return message["result"]

    async def _hear(self) -> dict[str, Any]:
        message = json.loads(await self._socket.receive_str(timeout=DEADLINE_S))
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif message.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        return message

    async def open(self, url: str) -> None:
        """Returns when the page is loaded."""
        await self.call("Page.navigate", url=url)
        while (await self._hear()).get("method") != "Page.loadEventFired":
            pass

    async def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression, which may be a promise."""
        result = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def wait(self, script: str) -> None:
        """Until the expression is true."""
        async with asyncio.timeout(DEADLINE_S):
            while not await self.evaluate(script):
                await asyncio.sleep(0.1)

    async def emulate(self, *, width: int = 1280, is_dark: bool = False) -> None:
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **metrics)
        feature = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def hurry(self, times: int) -> None:
        """Of pages that are opened from now on, timers and deadlines pass so many times as fast."""
        source = f"""
            const later = window.setTimeout, after = AbortSignal.timeout;
            window.setTimeout = (call, ms, ...more) => later(call, ms / {times}, ...more);
            AbortSignal.timeout = (ms) => after.call(AbortSignal, ms / {times});
        """
        await self.call("Page.addScriptToEvaluateOnNewDocument", source=f"{{{source}}}")

    async def press(self, key: str, code: int) -> None:
        """`code`: the virtual key code of Windows, which the protocol needs."""
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    async def screenshot(self) -> bytes:
        """A PNG of the whole page."""
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])


@contextmanager
def chromium() -> Generator[str]:
    """The URL of its DevTools."""
    assert PROGRAM is not None
    # Chromium writes there as long as any of its processes lives.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = [*FLAGS, f"--user-data-dir={profile}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        process = subprocess.Popen([PROGRAM, *flags, "about:blank"], stderr=subprocess.DEVNULL)
        try:
            port = Path(profile, "DevToolsActivePort")
            wait_until(lambda: port.exists() and port.read_text(), "the browser", DEADLINE_S)
            yield f"http://127.0.0.1:{port.read_text().split()[0]}"
        finally:
            process.kill()
            process.wait()


@asynccontextmanager
async def tab_of(devtools: str) -> AsyncGenerator[Browser]:
    """A new tab of a browser. `devtools`: its URL."""
    async with aiohttp.ClientSession() as session:
        async with session.put(f"{devtools}/json/new?about:blank") as answer:
            target = await answer.json()
        try:
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                tab = Browser(socket)
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await tab.call(f"{domain}.enable")
                await tab.call("Page.bringToFront")
                yield tab
        finally:
            async with session.get(f"{devtools}/json/close/{target['id']}"):
                pass


def axe_core(folder: Path) -> str:
    """The source of axe-core, which looks for what is not accessible. Skips the test where npm cannot give it."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm, which has axe-core")
    command = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), "axe-core@4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode:
        pytest.skip(f"npm cannot install axe-core: {done.stderr[-200:]}")
    return (folder / "node_modules/axe-core/axe.min.js").read_text()
