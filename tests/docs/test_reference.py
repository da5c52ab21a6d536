"""The generated pages of the reference agree with the models and commands, and their examples are accepted."""

from __future__ import annotations

import re
import shlex

import pytest
from typer.testing import CliRunner

from meshpar import ConfigError, Run, cli
from meshpar.config import load
from meshpar.federated import Federated
from reference import keys, pages, rooms
from tests.docs.page import ROOT

pytestmark = pytest.mark.matrix

SECTIONS = {root: keys.sections(root) for root in (Run, Federated)}
ALL = [(section, key) for found in SECTIONS.values() for section in found for key in section.keys]
FILES = {Run: ROOT / "configs" / "quickstart.yaml", Federated: ROOT / "configs" / "federated" / "digits.yaml"}


def test_the_pages_are_up_to_date():
    assert pages.outdated() == [], "write them: make reference"


def test_control_a_page_that_is_not_up_to_date_is_seen(tmp_path):
    for name, text in pages.PAGES.items():
        (tmp_path / name).write_text(text())
    page = tmp_path / "config.md"
    page.write_text(page.read_text().replace("The peak learning rate.", "The learning rate."))
    assert pages.outdated(tmp_path) == ["config.md"]


def test_the_map_of_the_rooms_is_up_to_date():
    page = rooms.PAGE.read_text()
    assert rooms.written(page) == page, "write it: make reference"


def test_control_a_room_without_a_docstring_is_seen(tmp_path, monkeypatch):
    (tmp_path / "meshpar").mkdir()
    (tmp_path / "meshpar" / "new.py").write_text("x = 1\n")
    monkeypatch.setattr(rooms, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=r"meshpar/new\.py has no docstring"):
        rooms.says("new")


def test_each_key_has_a_description():
    assert not [f"{s.model.__name__}.{key}" for s, key in ALL if not s.about["properties"][key].get("description")]


def test_each_key_is_in_the_table_of_its_model_or_of_a_class_that_the_model_names():
    for found in SECTIONS.values():
        placed = {section.model: section for section in keys.divided(found)}
        for section in found:
            own = placed[section.model]
            listed = [key for model in (section.model, *own.bases) for key in placed[model].keys]
            assert {*section.keys} <= {*listed}, section.title
            assert all(issubclass(section.model, base) for base in own.bases)


def test_the_model_accepts_each_example():
    for section, key in ALL:
        section.model(**section.data(key))


def test_control_an_example_that_the_model_refuses_is_seen(monkeypatch):
    monkeypatch.setitem(keys.EXAMPLES, "b1", 1.5)
    adamw = next(section for section in SECTIONS[Run] if section.model.__name__ == "AdamW")
    with pytest.raises(ConfigError, match="must be less than 1"):
        adamw.model(**adamw.data("b1"))


def test_each_example_of_a_root_can_be_typed():
    """With the shell's quotes, as overrides of a config that ships."""
    for root, (section, *_) in SECTIONS.items():
        for key in section.keys:
            load(root, FILES[root], shlex.split(section.example(key)))


def test_each_written_example_belongs_to_a_key():
    names = {name for section, key in ALL for name in (key, f"{section.model.__name__}.{key}")}
    assert not [name for name in keys.EXAMPLES if name.removesuffix(" needs") not in names]


@pytest.mark.parametrize("line", re.findall(r"^## meshpar (.+)$", (pages.FOLDER / "commands.md").read_text(), re.M))
def test_the_help_of_a_command_has_the_options_of_its_page(line):
    page = (pages.FOLDER / "commands.md").read_text()
    section = page.partition(f"\n## meshpar {line}\n")[2].partition("\n## ")[0]
    shown = CliRunner().invoke(cli.verbs(), [*line.split(), "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
    lines = "\n".join(re.findall(r"^(?:Also|Options:) .+$", section, re.M))
    options = {*re.findall(r"^\| `(--[\w-]+)`", section, re.M), *re.findall(r"`(--[\w-]+)`", lines)}
    assert options | {"--help"} == set(re.findall(r"^\W*(--[a-z0-9-]+)", shown, re.M))
