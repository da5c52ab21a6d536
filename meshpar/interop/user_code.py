"""Imports a user's own code that a config names, if the config is allowed to import it.

A config is data and may come from anywhere, so it must not bring code with it. A config may import a module only if
both are in the working directory: the config's file, and the module's file or its top package. A config in any other
folder, such as `downloads/it/config.yaml`, imports nothing. The command line can trust such a config: `--import FILE`
permits a module's file anywhere, and `model.target=package.module:name` permits that target, which is searched in the
working directory.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from meshpar.errors import ConfigError, MeshparError, nearest

_named: list[Path] = []
_permitted: dict[str, Path] = {}


def name(path: Path) -> None:
    """Permits a module's file anywhere, as `meshpar --import FILE` asks.

    Raises:
      ConfigError: the file does not exist, or is not a Python file.
    """
    if path.suffix != ".py" or not path.is_file():
        raise ConfigError(f"--import {path}: there is no such Python file")
    _named.append(path.resolve())


def named() -> list[Path]:
    """The files that `meshpar --import FILE` permits."""
    return list(_named)


def permit(target: str, config: Path | None) -> None:
    """Finds the file of a target that a config names, and permits its import.

    Args:
      config: the file that names the target, or the folder of a run; None if the command line does.

    Raises:
      ConfigError: the module does not exist, or this config may not import it.
    """
    module = target.partition(":")[0]
    for path in _named:
        if path.with_suffix("").parts[-len(module.split(".")) :] == tuple(module.split(".")):
            _permitted[target] = path
            return
    here = Path.cwd()
    path = _in_working_directory(module)
    if path is None:
        raise ConfigError(f"{target}: there is no {module.replace('.', '/')}.py in the working directory, {here}")
    if config is not None and (config.is_dir() or config.resolve().parent != here.resolve()):
        what = f"{config} may not import it: it is not in the working directory, where {module.partition('.')[0]} is"
        fix = f"if you trust it, run meshpar --import {path.relative_to(here)}"
        raise ConfigError(f"{target}: {what}; {fix}")
    _permitted[target] = path


def is_permitted(target: str) -> bool:
    """Whether this process may import it already."""
    return target in _permitted


def load(target: str) -> Any:
    """Imports a permitted target.

    Raises:
      ConfigError: the target was not permitted, its module cannot be imported, or has no such name.
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


@contextmanager
def blamed(target: str) -> Iterator[None]:
    """Turns an exception of a target's code into one line that names its file and line.

    Raises:
      ConfigError: in place of any exception that is not meshpar's.
    """
    try:
        yield
    except MeshparError:
        raise
    except Exception as error:
        where = _where(error, _permitted[target])
        first = next(iter(str(error).strip().splitlines()), "")
        raise ConfigError(f"{target} failed at {where}: {type(error).__name__}: {first}") from error


def _in_working_directory(module: str) -> Path | None:
    """The module's file in the working directory; None if it is missing, or a link leads out of the directory."""
    stem = Path.cwd().joinpath(*module.split("."))
    here = Path.cwd().resolve()
    candidates = (stem.with_suffix(".py"), stem / "__init__.py")
    return next((p for p in candidates if p.is_file() and p.resolve().is_relative_to(here)), None)


def _import(module: str, path: Path) -> ModuleType:
    num_above = len(module.split(".")) - 1 + (path.name == "__init__.py")
    root = path.resolve().parents[num_above]
    if str(root) not in sys.path:
        sys.path.append(str(root))  # last, so that it hides no other module
    importlib.invalidate_caches()
    first = importlib.util.find_spec(module.partition(".")[0])
    if first is None or not Path(first.origin or root).resolve().is_relative_to(root):
        raise ConfigError(f"{path}: an installed module has the name {module.partition('.')[0]} too; choose another")
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise ConfigError(f"{_where(error, path)} cannot be imported: {type(error).__name__}: {error}") from error


def _where(error: Exception, path: Path) -> str:
    """`file:line` of the last frame of a traceback that is in the file; the file alone if there is none."""
    file = str(path.resolve())
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{file}:{lines[-1]}" if lines else file
