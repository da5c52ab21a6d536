"""The site builds without warnings: links, headings, the menu, and the functions that pages document are found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.page import ROOT

CONFIG = ROOT / "mkdocs.yml"


def build(config: Path, site: Path) -> str:
    """The report of a strict build that fails, or ""."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config, "-d", site]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # the theme's, about itself
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    return done.stderr if done.returncode else ""


def test_the_site_builds_without_warnings(tmp_path):
    assert build(CONFIG, tmp_path) == ""
    fit = (tmp_path / "reference" / "api" / "index.html").read_text().partition('id="meshpar.fit"')[2]
    lines = re.sub(r"<[^>]+>", "", fit.partition("</code>")[0]).splitlines()
    assert [line.strip() for line in lines if "json" in line] == ["json: bool = False,"]  # each argument on its line
    page = (tmp_path / "guides" / "plan" / "index.html").read_text()
    assert "md-footer__link--next" in page and "Layouts" in page


@pytest.mark.parametrize(
    ("text", "warnings"),
    [("[a](none.md) [b](#none)", ["other.md", "none.md", "#none"]), ("::: meshpar.none", ["meshpar.none"])],
    ids=["links", "function"],
)
def test_control_a_warning_fails_the_build(text, warnings, tmp_path):
    pages = tmp_path / "docs"
    pages.mkdir()
    (pages / "index.md").write_text(f"# A page\n\n{text}\n")
    (pages / "other.md").write_text("# A page that the menu lacks\n")
    (tmp_path / "mkdocs.yml").write_text(f"INHERIT: {CONFIG}\ndocs_dir: {pages}\nnav: [index.md]\n")
    report = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert all(warning in report for warning in warnings)
