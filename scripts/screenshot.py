"""Takes the pictures of pages for docs/guides, with Chromium: of `meshpar inspect --html`, and of a server.

    python scripts/screenshot.py inspect
    python scripts/screenshot.py serve

Take that of an inspection again when a test of the figures below the picture fails, and that of a server after a change
of `meshpar/serve/http/page`. The run and the server are those of docs/guides/serve.md.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.wait import WebDriverWait

ROOT = Path(__file__).parents[1]
GUIDES = ROOT / "docs" / "guides"
CONFIG = ROOT / "configs" / "quickstart.yaml"
MESHPAR = [sys.executable, "-m", "meshpar"]
OTHERS = """
const others = async (seed) => {
  const body = JSON.stringify({prompt: "3 4 5", max_tokens: 400, temperature: 1, seed});
  const headers = {"Content-Type": "application/json"};
  for (;;) await (await fetch("v1/completions", {method: "POST", headers, body})).text();
};
for (const seed of [1, 2, 3]) others(seed);
"""
"""Clients that go on asking, so that the cache is in use when the picture is taken."""
SEND = """
document.getElementById("prompt").value = "3 4 5";
document.getElementById("max_tokens").value = 200;
document.getElementById("send").click();
"""
STATUS = "return document.getElementById('status').textContent"
IS_SHOWN = """
return document.querySelectorAll("#pages .held").length > 20
  && document.getElementById("answer").textContent.split(" ").length > 100;
"""


@contextmanager
def chromium(folder: Path, width: int, height: int) -> Iterator[Chrome]:
    """A headless browser with a page of this many pixels."""
    options = ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in ("headless", "no-sandbox", "disable-gpu", "hide-scrollbars", f"user-data-dir={folder / 'profile'}"):
        options.add_argument(f"--{flag}")
    # With the driver's path and SE_OFFLINE, selenium does not search for a driver.
    driver = Chrome(options=options, service=Service("/usr/bin/chromedriver", env=os.environ | {"SE_OFFLINE": "true"}))
    try:
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        yield driver
    finally:
        driver.quit()


def inspect(folder: Path) -> None:
    """The top of the page of the quickstart's step."""
    page = folder / "step.html"
    subprocess.run([*MESHPAR, "inspect", CONFIG, "--html", page], check=True)
    with chromium(folder, 960, 1310) as browser:
        browser.get(page.as_uri())
        browser.save_screenshot(str(GUIDES / "inspect.png"))


def serve(folder: Path) -> None:
    """The server's page with an answer, while others ask."""
    text = (GUIDES / "serve.md").read_text()
    subprocess.run([sys.executable, "-c", _block(text, "python")], cwd=folder, check=True)
    command = [*MESHPAR, *shlex.split(_block(text, "sh"))[1:]]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as server:
        try:
            url = next(found[1] for line in server.stderr or () if (found := re.match(r"listening at (\S+)", line)))
            with chromium(folder, 900, 660) as browser:
                wait = WebDriverWait(browser, 60, poll_frequency=0.02)
                browser.get(f"{url}/")
                wait.until(lambda b: b.execute_script(STATUS).startswith("ok"))
                browser.execute_script(OTHERS)
                browser.execute_script(SEND)
                wait.until(lambda b: b.execute_script(IS_SHOWN))
                browser.save_screenshot(str(GUIDES / "serve.png"))
        finally:
            server.send_signal(signal.SIGTERM)


def _block(text: str, language: str) -> str:
    """The first block of a language in a page."""
    found = re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert found
    return found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", choices=("inspect", "serve"))
    picture = parser.parse_args().picture
    with TemporaryDirectory() as name:
        {"inspect": inspect, "serve": serve}[picture](Path(name))


if __name__ == "__main__":
    main()
