"""A real browser without a window, driven over WebDriver (W3C) by the standard library alone.

``chromium`` and ``chromedriver`` are on the PATH, or named by UNICRON_TEST_BROWSER and UNICRON_TEST_DRIVER.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

BROWSER = os.environ.get("UNICRON_TEST_BROWSER") or shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = os.environ.get("UNICRON_TEST_DRIVER") or shutil.which("chromedriver")
WHY_NOT = (
    ""
    if BROWSER and DRIVER
    else "no chromium with chromedriver: UNICRON_TEST_BROWSER and UNICRON_TEST_DRIVER name them"
)
DEADLINE_S = 30.0
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the name that the standard gives it


class Browser:
    """From its making to ``close``."""

    def __init__(self, folder: Path, width: int = 1280, height: int = 900) -> None:
        """``folder`` is for what the browser writes."""
        assert BROWSER
        assert DRIVER
        self._driver = subprocess.Popen(
            [DRIVER, "--port=0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "TMPDIR": str(folder)},
        )
        assert self._driver.stdout is not None
        port = next(
            line.split("port ")[1].strip(" .\n") for line in self._driver.stdout if "successfully on port" in line
        )
        self._url = f"http://127.0.0.1:{port}/session"
        arguments = ["--headless=new", f"--window-size={width},{height}", "--disable-gpu", "--disable-dev-shm-usage"]
        arguments += ["--hide-scrollbars", "--disable-background-networking", f"--user-data-dir={folder / 'profile'}"]
        if os.geteuid() == 0:
            arguments.append("--no-sandbox")  # which root cannot have
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": BROWSER, "args": arguments},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        try:
            found = self._call("POST", "", {"capabilities": {"alwaysMatch": wanted}})
        except BaseException:
            self._driver.kill()
            raise
        self._url = f"{self._url}/{found['sessionId']}"

    def close(self) -> None:
        """Ends the browser."""
        try:
            self._call("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.wait(20)

    def open(self, url: str) -> None:
        """Shows a page, once it is loaded."""
        self._call("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def until(self, script: str, *arguments: Any) -> Any:
        """What a script returns, once that is something."""
        deadline = time.monotonic() + DEADLINE_S
        while not (found := self.run(script, *arguments)):
            assert time.monotonic() < deadline, f"not seen: {script}\n{self.text('body')}\n{self.log()}"
            time.sleep(0.05)
        return found

    def text(self, selector: str) -> str:
        """What a person sees of an element."""
        found = self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)
        assert isinstance(found, str)
        return found

    def type(self, selector: str, text: str) -> None:
        """Presses keys."""
        self._of(selector, lambda path: self._call("POST", f"{path}/value", {"text": text}))

    def press(self, selector: str) -> None:
        """Clicks, as with a mouse."""
        self._of(selector, lambda path: self._call("POST", f"{path}/click", {}))

    def emulate(self, *, dark: bool, width: int, height: int) -> None:
        """Another taste and another device."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        size = {"width": width, "height": height, "deviceScaleFactor": 2 if width < 600 else 1, "mobile": width < 600}
        self._cdp("Emulation.setEmulatedMedia", {"features": [scheme]})
        self._cdp("Emulation.setDeviceMetricsOverride", size)

    def screenshot(self, *, whole: bool = True) -> bytes:
        """PNG, of the whole page or of what is in view."""
        found = self._cdp("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole})
        return base64.b64decode(found["data"])

    def log(self) -> list[str]:
        """What the browser has complained about since the last time."""
        return [each["message"] for each in self._call("POST", "/se/log", {"type": "browser"})]

    def _cdp(self, command: str, parameters: dict[str, Any]) -> Any:
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _of(self, selector: str, act: Callable[[str], Any]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            found = self._call("POST", "/element", {"using": "css selector", "value": selector})
            try:
                return act(f"/element/{found[_ELEMENT]}")
            except AssertionError as error:  # the page was drawn anew in between
                if "stale element" not in str(error) or time.monotonic() > deadline:
                    raise

    def _call(self, method: str, path: str, told: Any = None) -> Any:
        sent = None if told is None else json.dumps(told).encode()
        request = urllib.request.Request(self._url + path, sent, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.loads(answer.read())["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.read().decode()[:1000]}") from None
