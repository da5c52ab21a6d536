"""Opens adapters that a server has beside its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshpar.errors import CheckpointError, ConfigError, Problems
from meshpar.interop.peft import is_adapter
from meshpar.interop.peft_params import AdapterParams, adapter_params
from meshpar.nn.lora import NAME, is_lora
from meshpar.nn.side_adapters import SideAdapters
from meshpar.serve.source import Source
from meshpar.tree import flatten_with_paths, map_with_path


@dataclass(frozen=True)
class OpenedAdapters:
    """Adapters of one model, in the order of their numbers.

    Args:
      read: their matrices, on the host.
    """

    names: tuple[str, ...]
    read: tuple[AdapterParams, ...]

    @property
    def sizes(self) -> SideAdapters:
        paths = sorted({path for one in self.read for path in one.updates})
        return SideAdapters(tuple(one.rank for one in self.read), tuple(paths))

    def restore(self, source: Source, params: Any) -> Any:
        """The parameters of the model, and those of the adapters.

        Args:
          params: tree of structs with shardings, of the model with `sizes`.
        """
        structs = flatten_with_paths(params)
        found = {path: self._array(path, struct) for path, struct in structs.items() if is_lora(path)}
        of_model = flatten_with_paths(source.restore(_without_lora(params)))
        return map_with_path(lambda path, _: (of_model | found)[path], params)

    def _array(self, path: str, struct: jax.ShapeDtypeStruct) -> jax.Array:
        """The matrices of all adapters of one projection, side by side; zeros where an adapter has none."""
        projection, _, name = path.rpartition(f".{NAME}.")
        whole = np.zeros(struct.shape, struct.dtype)
        begin = 0
        for one in self.read:
            for place, update in one.updates.get(projection, {}).items():
                rank = update.b.shape[0]
                part = whole[place]  # a view
                if name == "a":
                    part[..., begin : begin + rank] = update.a
                else:
                    part[begin : begin + rank] = update.b * update.scale
            begin += one.rank
        return jax.device_put(whole, struct.sharding)


def open_adapters(source: Source, folders: Mapping[str, Path]) -> OpenedAdapters | None:
    """Reads adapters of PEFT for the model of a source; None if there are none.

    Args:
      folders: by the names that requests select.

    Raises:
      ConfigError: the model is none of meshpar's own decoders.
      CheckpointError: lists all adapters that are none of this model.
    """
    if not folders:
        return None
    if source.own:
        what = f"adapters are served beside meshpar's own decoders, and model.kind = {source.run.model.kind}"
        raise ConfigError(f"--adapter: {what}; serve the adapter's folder alone, which merges it")
    problems = Problems()
    read: list[AdapterParams] = []
    for name, folder in folders.items():
        if not is_adapter(folder):
            problems.add(f"--adapter {name}={folder}", "is no folder with an adapter_config.json")
            continue
        try:
            adapter = adapter_params(folder, source.model, source.folder)
        except CheckpointError as error:
            problems.add(f"--adapter {name}={folder}", str(error))
            continue
        if adapter.has_magnitudes:
            what = "has magnitudes of DoRA, which scale the whole matrix and not its update"
            problems.add(f"--adapter {name}={folder}", what, "merge it: serve its folder alone")
        read.append(adapter)
    problems.raise_any(CheckpointError, "the adapters do not fit the model:")
    return OpenedAdapters(tuple(folders), tuple(read))


def adapter_folders(given: Sequence[str], model: str) -> dict[str, Path]:
    """The folders of `--adapter NAME=FOLDER`.

    Args:
      model: the name of the model itself.

    Raises:
      ConfigError: one has no name, or names that are used already.
    """
    problems = Problems()
    found: dict[str, Path] = {}
    for one in given:
        name, _, folder = one.partition("=")
        if not name or not folder:
            problems.add(f"--adapter {one}", "has no name or no folder", "--adapter NAME=FOLDER")
        elif name in found or name == model:
            whose = "the model itself" if name == model else "another adapter"
            problems.add(
                f"--adapter {one}", f"{name!r} is the name of {whose}", "another name, or --name for the model's"
            )
        else:
            found[name] = Path(folder)
    problems.raise_any(ConfigError, "the adapters need names of their own:")
    return found


def _without_lora(params: Any) -> Any:
    if not isinstance(params, dict):
        return params
    return {name: _without_lora(one) for name, one in params.items() if name != NAME}
