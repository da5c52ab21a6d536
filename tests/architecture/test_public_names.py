"""What is public is documented, and what is documented is public."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import meshpar
from meshpar import synonyms
from meshpar.config import Config
from meshpar.config.annotations import reachable

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "index.md"


def is_documented(name: str, value: object) -> bool:
    """Whether a docstring was written: dataclasses generate one, and a module of the same name does not count."""
    return not inspect.ismodule(value) and not (value.__doc__ or f"{name}(").startswith(f"{name}(")


NAMESPACES = {name: getattr(meshpar, name) for name in meshpar.__all__ if inspect.ismodule(getattr(meshpar, name))}
"""Public names that are modules, with public names of their own."""


@pytest.mark.parametrize("name", [name for name in meshpar.__all__ if name not in NAMESPACES])
def test_a_public_name_has_a_docstring(name):
    value = getattr(meshpar, name)
    assert is_documented(name, value), f"meshpar.{name} is {value!r}, with the docstring {value.__doc__!r}"


def test_a_missing_docstring_is_seen():
    undocumented = dataclasses.make_dataclass("Planted", ["field"])
    assert not is_documented("Planted", undocumented)
    assert not is_documented("planted", lambda: None)
    assert not is_documented("inspect", inspect)


def listed(space: str) -> list[str]:
    """The names of `meshpar` or of a namespace that the reference lists: in tables, and classes of configs in lists."""
    page = REFERENCE.read_text()
    prefix = "" if space == "meshpar" else rf"{space}\."
    found = re.findall(rf"^\| `{prefix}(\w+)` \|", page, re.M)
    for spaces, names in re.findall(r"^- ((?:`meshpar` and )?`\w+`): (.+)\.$", page, re.M):
        found += re.findall(r"`(\w+)`", names) if f"`{space}`" in spaces else []
    return found


def test_the_reference_lists_exactly_the_public_names():
    assert sorted(listed("meshpar")) == sorted(meshpar.__all__)


@pytest.mark.parametrize("name", NAMESPACES)
def test_the_reference_lists_exactly_the_public_names_of_a_namespace(name):
    """All submodules are imported first: one of the same name would replace a public name."""
    public = NAMESPACES[name]
    for module in pkgutil.iter_modules(getattr(public, "__path__", [])):
        importlib.import_module(f"{public.__name__}.{module.name}")
    assert sorted(listed(name)) == sorted(public.__all__)
    assert public.__doc__ is not None
    assert all(is_documented(name, getattr(public, name)) for name in public.__all__)


def test_a_class_of_a_config_that_has_no_line_of_its_own_has_a_section():
    """The page of the keys says what it is."""
    lists = re.findall(r"^- (?:`meshpar` and )?`\w+`: (.+)\.$", REFERENCE.read_text(), re.M)
    pages = [REFERENCE.with_name(f"{page}.md").read_text() for page in ("config", "federated")]
    titles = set(re.findall(r"^#+ (?:.*: )?(\w+)$", "\n".join(pages), re.M))
    named = {name for names in lists for name in re.findall(r"`(\w+)`", names)}
    assert named
    assert named <= titles


def test_only_the_intended_modules_are_public_namespaces():
    models = {"attention", "experts", "models", "optim", "pipeline", "tables"}
    intended = models | {"collectives", "convert", "data", "export", "federated", "loggers"}
    assert set(NAMESPACES) == intended


def public_values():
    spaces = [meshpar, *NAMESPACES.values()]
    return {id(getattr(space, name)) for space in spaces for name in space.__all__}


@pytest.mark.parametrize("config", sorted(reachable(meshpar.Run), key=lambda config: config.__name__))
def test_a_config_that_a_run_holds_is_public(config):
    assert id(config) in public_values()


def test_control_a_config_that_no_run_holds_is_not_public():
    assert id(type("Planted", (Config,), {})) not in public_values()


def test_nothing_that_needs_jax_or_pydantic_is_imported_before_it_is_used():
    """Listing the public names, as an editor does, imports neither."""
    code = "import sys, meshpar; dir(meshpar); sys.exit(bool({'jax', 'pydantic', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    control = code.replace("dir(meshpar)", "meshpar.optim.AdamW")
    assert subprocess.run([sys.executable, "-c", control]).returncode == 1


# Names that are not there --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*map(str.capitalize, synonyms.PUBLIC), "DeviceMesh", "TrainingArguments"])
def test_a_guessed_name_is_answered_with_ours(name):
    """Every word of the answer that looks like a public name is one."""
    assert not hasattr(meshpar, name)
    with pytest.raises(AttributeError, match=f"meshpar has no {name}: ") as raised:
        getattr(meshpar, name)
    words = re.findall(r"\b([A-Z]\w+|\w+(?=\())", str(raised.value).partition(": ")[2])
    unknown = {word for word in words if word not in meshpar.__all__ and not hasattr(meshpar.data, word)}
    assert unknown <= {"Hugging", "Face", "Python", "CPU", "RUN", "Optax", "put", "step", "compile_init"}


def test_an_import_of_a_guessed_name_is_answered_too():
    with pytest.raises(ImportError, match=r"^meshpar has no Trainer: use fit\(run\)"):
        exec_import("Trainer")
    with pytest.raises(ImportError, match=r"^meshpar has no chekpoints: did you mean checkpoints"):
        exec_import("chekpoints")
    exec_import("planning")  # a module


def exec_import(name: str) -> None:
    importlib.__import__("meshpar", fromlist=[name])


def test_each_module_is_imported_from_meshpar_as_before():
    code = "from meshpar import chaos, cost; import meshpar.cli; print(meshpar.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == f"{importlib.metadata.version('meshpar')}\n", done.stderr


def test_each_name_resolves_in_a_process_that_imported_nothing_else():
    """A lazily imported name must not depend on what was imported before."""
    code = "import meshpar; [getattr(meshpar, name) for name in sorted(meshpar.__all__)]"
    subprocess.run([sys.executable, "-c", code], check=True)
