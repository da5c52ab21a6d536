"""Each picture of a page is made by a command that stands on the page, or by `scripts/pictures.py`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pictures
from tests.docs.page import ROOT
from tests.docs.test_layouts import SHOWN

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
PICTURE = re.compile(r"(?:\]\(|src(?:set)?=\")([\w./-]+\.(?:png|svg))")
MADE = r'(?:savefig\(|open\(|--out |--plot |--svg |python scripts/\w+\.py )"?{}\b'
SHOT = r"`python scripts/screenshot\.py {}`, 20\d\d-\d\d-\d\d"


def unmade(text: str, folder: Path) -> list[str]:
    """The pictures of a page that no command on it makes, nor `scripts/screenshot.py` at a date."""
    found = []
    for name in PICTURE.findall(text):
        if (folder / name).resolve() in pictures.pictures():
            continue
        file = re.escape(Path(name).name)
        plain = re.escape(Path(name).name.replace("-clients.png", ".png"))  # `meshpar plot` writes both
        shot = SHOT.format(re.escape(Path(name).stem))
        if not (re.search(MADE.format(f"(?:{file}|{plain})"), text) or re.search(shot, text)):
            found.append(name)
    return found


@pytest.mark.parametrize(
    "page", [page for page in PAGES if PICTURE.search(page.read_text())], ids=lambda page: page.stem
)
def test_each_picture_of_a_page_is_made_by_a_command(page):
    assert unmade(page.read_text(), page.parent) == []


def test_control_a_picture_that_nothing_makes_is_seen(tmp_path):
    page = '![a](one.png)\n```python\nfigure.savefig("two.png")\n```\n![b](two.png) ![c](three.svg)\n'
    assert unmade(page, tmp_path) == ["one.png", "three.svg"]
    assert unmade("(A screenshot of 2026-11-23).\n![a](one.png)\n", tmp_path) == ["one.png"]
    assert unmade("(`python scripts/screenshot.py one`, 2026-11-23).\n![a](one.png)\n", tmp_path) == []


def test_each_picture_is_on_a_page():
    shown = {(page.parent / name).resolve() for page in PAGES for name in PICTURE.findall(page.read_text())}
    assert {path for ending in ("png", "svg") for path in DOCS.rglob(f"*.{ending}")} == shown


def test_the_screenshot_of_an_inspection_is_of_todays_program():
    """If this fails, take it again: scripts/screenshot.py inspect."""
    _, _, sent, held = SHOWN["ZeRO-3 and tensor"]
    caption = f"(It sends {sent.partition(':')[0]} and holds {held}; `python scripts/screenshot.py inspect`, 20"
    assert caption in (DOCS / "guides" / "inspect.md").read_text()
