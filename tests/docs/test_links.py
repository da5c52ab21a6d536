"""Each link of a page leads to a file of the repository and a heading in it, and each page is in the site's menu.

Links to other sites are not followed: CI would depend on them.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from tests.docs.page import ROOT

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")
APPEARANCE = {"only-light", "only-dark"}
"""Fragments with which the site shows a picture in one of its two modes."""


def links(text: str) -> list[str]:
    return [a or b for a, b in LINK.findall(CODE.sub("", text)) if not re.match(r"https?:", a or b)]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as Python-Markdown makes them."""
    found: Counter[str] = Counter()
    for title in re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
        found[slug] += 1
        found[f"{slug}_{found[slug] - 1}"] += found[slug] > 1
    return set(+found)


def broken(page: Path) -> list[str]:
    wrong = []
    for link in links(page.read_text()):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        is_heading = anchor and anchor not in APPEARANCE
        if not target.exists() or (is_heading and anchor not in anchors(target.read_text())):
            wrong.append(link)
    return wrong


def in_menu(nav: object) -> set[str]:
    """The files of a menu, at any depth."""
    if isinstance(nav, str):
        return {nav}
    inner = nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else []
    return {found for one in inner for found in in_menu(one)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_links_of_a_page_lead_somewhere(page):
    assert broken(page) == []


def test_the_menu_has_each_page_of_the_site():
    nav = re.search(r"^nav:\n(?:[ ].*\n)+", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert nav
    written = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert in_menu(yaml.safe_load(nav[0])["nav"]) == written


@pytest.mark.parametrize("link", ["other.md", "page.md#none", "#none", "picture.png"])
def test_control_a_broken_link_is_seen(link, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"# A heading: `it`\n\n[right](page.md#a-heading-it), [right](#a-heading-it), [it]({link})\n")
    assert broken(page) == [link]
