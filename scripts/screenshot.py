"""Takes the picture of the page of `meshpar inspect --html` for docs/guides/inspect.md, with Chromium.

    python scripts/screenshot.py [--browser chromium]

Take it again when a test of the figures below the picture fails.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "quickstart.yaml"
PICTURE = ROOT / "docs" / "guides" / "inspect.png"
WIDTH, HEIGHT = 960, 1310
"""Pixels; the page goes on below."""
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--browser", default="chromium", help="the command that starts Chromium")
    browser = parser.parse_args().browser
    with TemporaryDirectory() as folder:
        page = Path(folder) / "step.html"
        subprocess.run([sys.executable, "-m", "meshpar", "inspect", CONFIG, "--html", page], check=True)
        options = [*FLAGS, f"--user-data-dir={folder}/profile", f"--screenshot={PICTURE}"]
        subprocess.run([browser, *options, page.as_uri()], check=True)


if __name__ == "__main__":
    main()
