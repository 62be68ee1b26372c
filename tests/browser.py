"""Headless Chromium, driven by the DevTools protocol through a pipe: what a page looks like, says and asks for.

with Browser() as browser:
    page = browser.open(path, width=360, dark=True)
    page.evaluate("document.title")
    page.problems, page.requests
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

_TIME_LIMIT_S = 120.0
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)


def chromium() -> str:
    """The path of Chromium. Skips the test where there is none; in CI, where it is installed, that is a failure."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name)
        if found is not None:
            return found
    if "CI" in os.environ:
        pytest.fail("there is no Chromium, which .ci/run installs")
    pytest.skip("needs Chromium: apt-get install chromium")


class Page:
    """A page in a tab: ``problems`` are the errors and warnings that it logged, ``requests`` the URLs it asked for."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._browser, self._session, self._target = browser, session, target

    def call(self, method: str, **parameters: Any) -> Any:
        return self._browser.call(method, self._session, **parameters)

    def evaluate(self, script: str) -> Any:
        """The value of an expression of JavaScript, which may be a promise."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def screenshot(self, path: Path) -> None:
        """The whole page as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self, path: Path) -> None:
        """The page as it is printed."""
        printed = self.call("Page.printToPDF", preferCSSPageSize=True, printBackground=False)
        path.write_bytes(base64.b64decode(printed["data"]))

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)


class Browser:
    """A running browser, in a directory of its own; a context manager."""

    def __init__(self) -> None:
        program = chromium()
        self._home = tempfile.TemporaryDirectory(prefix="chromium-")
        to_browser, from_browser = os.pipe(), os.pipe()
        self._write, self._read = to_browser[1], from_browser[0]
        # The protocol is on the descriptors 3 and 4 of the browser.
        command = 'exec 3<&"$0" 4>&"$1"; shift; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", command, str(to_browser[0]), str(from_browser[1]), program, *_OPTIONS,
             f"--user-data-dir={self._home.name}", "about:blank"],
            pass_fds=(to_browser[0], from_browser[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": self._home.name},
        )  # fmt: skip
        os.close(to_browser[0])
        os.close(from_browser[1])
        self._number = 0
        self._rest = b""
        self._pages: dict[str, Page] = {}

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self.call("Browser.close")
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._home.name, ignore_errors=True)
        self._home.cleanup()

    def open(self, path: Path, *, width: int = 1000, dark: bool = False, media: str = "") -> Page:
        """A page from a file, loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, target)
        page.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        page.call("Emulation.setEmulatedMedia", media=media, features=features)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call("Page.navigate", url=path.absolute().as_uri())
        page.evaluate(
            "new Promise((done) => document.readyState === 'complete' ? done() : addEventListener('load', done))"
        )
        limit = time.monotonic() + _TIME_LIMIT_S
        while page.evaluate("location.href === 'about:blank' || document.readyState !== 'complete'"):
            assert time.monotonic() < limit, f"{path} does not load"
        return page

    def call(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        """The result of a method of the protocol; what happens meanwhile is noted in its page."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        page = self._pages.get(event.get("sessionId", ""))
        if page is None:
            return
        method, said = event["method"], event["params"]
        if method == "Runtime.exceptionThrown":
            page.problems.append(str(said["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            page.problems.append(str(said["args"]))
        elif method == "Log.entryAdded":
            page.problems.append(said["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            page.requests.append(said["request"]["url"])

    def _receive(self) -> dict[str, Any]:
        limit = time.monotonic() + _TIME_LIMIT_S
        poll = select.poll()  # select takes no descriptor above 1023
        poll.register(self._read, select.POLLIN)
        while b"\0" not in self._rest:
            ready = poll.poll(1000 * max(limit - time.monotonic(), 0))
            piece = os.read(self._read, 1 << 20) if ready else b""
            if not piece:
                raise RuntimeError("the browser does not answer" if not ready else "the browser has ended")
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found
