"""Code of the user's own that a config names: it is found, permitted, and only then imported.

A config is data, and may come from anywhere. It gets code run only where the user meant it: the module lies in the
working directory and so does the config, or the command line names the target itself; or the command line names the
module's file.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import pydantic

from meshpar.errors import ConfigError, nearest

Target = Annotated[str, pydantic.StringConstraints(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")]
"""`package.module:name`."""

_named: list[Path] = []
_permitted: dict[str, Path] = {}


def name(path: Path) -> None:
    """Permits a module's file, wherever it lies: what `meshpar --import FILE` does.

    Raises:
      ConfigError: there is no such file, or it holds no Python.
    """
    if path.suffix != ".py" or not path.is_file():
        raise ConfigError(f"--import {path}: there is no such Python file")
    _named.append(path.resolve())


def permit(target: str, config: Path | None) -> None:
    """Finds the file of a target that a config names, and permits it to be imported.

    Args:
      config: the file that names it; None where the command line does.

    Raises:
      ConfigError: there is no such module, or nobody said that this config may import it.
    """
    module = target.partition(":")[0]
    for path in _named:
        if path.with_suffix("").parts[-len(module.split(".")) :] == tuple(module.split(".")):
            _permitted[target] = path
            return
    path = _in_working_directory(module)
    if path is None:
        raise ConfigError(f"{target}: there is no {module.replace('.', '/')}.py in the working directory, {Path.cwd()}")
    if config is not None and not _is_here(config):
        what = f"{config} lies outside of the working directory, and may not have {path.name} imported"
        fix = f"if that is meant, say meshpar --import {path.relative_to(Path.cwd())}"
        raise ConfigError(f"{target}: {what}; {fix}")
    _permitted[target] = path


def load(target: str) -> Any:
    """What a target names.

    Raises:
      ConfigError: it was not permitted; the module cannot be imported, or has no such name.
    """
    module, _, attribute = target.partition(":")
    if target not in _permitted:
        raise ConfigError(f"{target} was not permitted to be imported; see meshpar --import")
    imported = _import(module, _permitted[target])
    if not hasattr(imported, attribute):
        near = nearest(attribute, [name for name in vars(imported) if not name.startswith("_")])
        hint = f"; did you mean {near}?" if near else ""
        raise ConfigError(f"{target}: {_permitted[target]} has no {attribute}{hint}")
    return getattr(imported, attribute)


def _in_working_directory(module: str) -> Path | None:
    """The module's file, unless a link leads out of the working directory."""
    stem = Path.cwd().joinpath(*module.split("."))
    return next((p for p in (stem.with_suffix(".py"), stem / "__init__.py") if p.is_file() and _is_here(p)), None)


def _is_here(path: Path) -> bool:
    return path.resolve().is_relative_to(Path.cwd().resolve())


def _import(module: str, path: Path) -> ModuleType:
    num_above = len(module.split(".")) - 1 + (path.name == "__init__.py")
    root = path.resolve().parents[num_above]
    if str(root) not in sys.path:
        sys.path.append(str(root))  # at the end: it hides no other module
    importlib.invalidate_caches()
    first = importlib.util.find_spec(module.partition(".")[0])
    if first is None or not Path(first.origin or root).resolve().is_relative_to(root):
        raise ConfigError(f"{path}: an installed module has the name {module.partition('.')[0]} too; choose another")
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise ConfigError(f"{path} cannot be imported: {_told(error, path)}") from error


def _told(error: Exception, path: Path) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    where = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {error}{where}"
