"""A real browser: headless, with a profile of its own, without background network calls, ended after the tests."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

BROWSER = Path("/usr/bin/chromium")
DRIVER = Path("/usr/bin/chromedriver")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
]  # fmt: skip


def require(driver: Path = DRIVER) -> None:
    """Skips a test where there is no Chromium; fails it where MESHPAR_REQUIRE_CHROMIUM=1 says that there must be."""
    if driver.exists():
        return
    reason = f"no {driver}: apt-get install chromium chromium-driver"
    if os.environ.get("MESHPAR_REQUIRE_CHROMIUM") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


class Browser:
    """Chromium showing a page."""

    def __init__(self, driver: Chrome):
        self.driver = driver

    def open(self, page: Path, width: int, scheme: str = "light") -> None:
        """Shows a file on a screen `width` CSS pixels wide, and clears the logs."""
        scheme_ = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.screen(width)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme_)
        _ = self.driver.get_log("browser"), self.driver.get_log("performance")
        self.driver.get(page.as_uri())

    def screen(self, width: int) -> None:
        """Makes the screen `width` CSS pixels wide."""
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        return self.driver.execute_script(f"return {expression}")

    def console(self) -> list[str]:
        """The messages that the page has logged since it was opened."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """The URLs that were requested since the page was opened, except its own."""
        events = (json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance"))
        asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in asked if url != self.driver.current_url]


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Starts a browser, and checks afterwards that none of its processes is left."""
    require()
    options = ChromeOptions()
    options.binary_location = str(BROWSER)
    for flag in [*FLAGS, f"--user-data-dir={profile}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # With the driver's path and SE_OFFLINE, selenium does not search for a driver.
    service = Service(str(DRIVER), env=os.environ | {"SE_OFFLINE": "true", "SE_AVOID_STATS": "true"})
    driver = Chrome(options=options, service=service)
    try:
        yield Browser(driver)
    finally:
        driver.quit()
    assert not _left(profile), "the browser is still running"


def _left(profile: Path, seconds: float = 10) -> list[str]:
    """The processes that still have the profile in their command line, after they had a while to end."""
    until = time.monotonic() + seconds
    while (
        found := [p for p in Path("/proc").glob("[0-9]*") if str(profile) in _command(p)]
    ) and time.monotonic() < until:
        time.sleep(0.1)
    return [_command(process) for process in found]


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_text()
    except OSError:  # it has ended
        return ""
