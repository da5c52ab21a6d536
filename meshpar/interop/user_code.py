"""Code of the user's own that a config names: it is found, permitted, and only then imported.

A config is data, and may come from anywhere; it must not bring code with it. So a config may import a module only if
the two stand side by side in the working directory: the config's file, and the module's file or the folder of its top
package. A config in any other folder, such as `downloads/it/config.yaml`, imports nothing. Whoever trusts it says so on
the command line: `--import FILE` permits a module's file, wherever it is, and `model.target=package.module:name`
permits that target, found from the working directory.
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
    here = Path.cwd()
    path = _in_working_directory(module)
    if path is None:
        raise ConfigError(f"{target}: there is no {module.replace('.', '/')}.py in the working directory, {here}")
    if config is not None and config.resolve().parent != here.resolve():
        what = f"{config} is not in the working directory, beside {module.partition('.')[0]}, and may not import it"
        fix = f"if you trust it, say meshpar --import {path.relative_to(here)}"
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


@contextmanager
def blamed(target: str) -> Iterator[None]:
    """Within, what the code of a target raises becomes one line that names its file and line.

    Raises:
      ConfigError: in place of any other exception.
    """
    try:
        yield
    except MeshparError:
        raise
    except Exception as error:
        path = _permitted[target].resolve()
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f"{path}:{lines[-1]}" if lines else str(path)
        first = next(iter(str(error).strip().splitlines()), "")
        raise ConfigError(f"{target} failed at {where}: {type(error).__name__}: {first}") from error


def _in_working_directory(module: str) -> Path | None:
    """The module's file, unless a link leads out of the working directory."""
    stem = Path.cwd().joinpath(*module.split("."))
    here = Path.cwd().resolve()
    candidates = (stem.with_suffix(".py"), stem / "__init__.py")
    return next((p for p in candidates if p.is_file() and p.resolve().is_relative_to(here)), None)


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
