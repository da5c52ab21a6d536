"""Writes a trained model as a StableHLO program, with its parameters beside it.

model.jax           the program as `jax.export` serializes it; `jax.export.deserialize` reads it
model.mlirbc        the same program as StableHLO's portable bytecode, for other runtimes
model.safetensors   the parameters, by path
signature.json      names, dtypes, shapes and order of arguments and results
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from meshpar.errors import ConfigError, Problems, excerpt, suggestion
from meshpar.export.forward import Exportable, first_of, open_run
from meshpar.interop.export import check_free, whole_or_not
from meshpar.interop.safetensors import Written, write
from meshpar.tree import flatten_with_paths, map_with_path

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def stablehlo(source: Path | str, folder: Path | str, platforms: Sequence[str] = ("cpu",)) -> None:
    """Exports the last checkpoint of a run as a program for some platforms, of any batch size and length of rows.

    A user's own model is exported as its evaluation calls it. If its trace needs the length of a row, the program has
    that of the run's data; `signature.json` says so.

    Args:
      source: a run directory, or the config of a run.
      folder: created, complete or not at all.
      platforms: some of `cpu`, `cuda`, `rocm` and `tpu`. Devices are not needed.

    Raises:
      ConfigError: lists the unknown platforms; or the model cannot be traced, or called with the arrays of a batch.
      CheckpointError: the folder exists, or there is no checkpoint.

    Memory: the parameters, and a copy of one of them.
    """
    _check_platforms(platforms)
    check_free(Path(folder))
    _write(open_run(Path(source)), Path(folder), platforms)


def function(
    apply: Callable[[Any, Any], Any], params: Any, inputs: Any, folder: Path | str, platforms: Sequence[str] = ("cpu",)
) -> None:
    """Exports a function of your own, of any number of rows, in the same form; its parameters are arguments by path.

    Args:
      apply: (params, inputs) -> its results, as `lambda params, batch: model.apply({"params": params}, batch["x"])`.
      params: tree of arrays, such as those of a state; `meshpar.averaged(state)` are the averages.
      inputs: tree of arrays or structs; the first dim of each is the rows.
      folder, platforms: see `stablehlo`.

    Raises: see `stablehlo`.

    Examples:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as name:
      ...     folder = Path(name) / "linear"
      ...     function(lambda params, x: x @ params["w"], {"w": jnp.ones((4, 2))}, jnp.ones((1, 4)), folder)
      ...     program = export.deserialize(bytearray((folder / "model.jax").read_bytes()))
      >>> program.call({"w": jnp.ones((4, 2))}, jnp.ones((3, 4))).shape
      (3, 2)
    """
    _check_platforms(platforms)
    check_free(Path(folder))

    def of_paths(arrays: Mapping[str, Any], inputs: Any) -> Any:
        return apply(map_with_path(lambda path, _: arrays[path], params), inputs)

    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), inputs)
    _write(Exportable(of_paths, flatten_with_paths(params), structs), Path(folder), platforms)


def _write(made: Exportable, folder: Path, platforms: Sequence[str]) -> None:
    exported = exported_for(made, platforms)
    with whole_or_not(folder) as there:
        (there / "model.jax").write_bytes(exported.serialize())
        (there / "model.mlirbc").write_bytes(exported.mlir_module_serialized)
        write(there / "model.safetensors", [_written(name, x) for name, x in made.arrays.items()])
        (there / "signature.json").write_text(json.dumps(_signature(exported, made), indent=2) + "\n")


def _check_platforms(platforms: Sequence[str]) -> None:
    problems = Problems()
    for name in platforms:
        if name not in PLATFORMS:
            fix = suggestion(name, PLATFORMS, f"there are {', '.join(PLATFORMS)}")
            problems.add("platforms", f"{name!r} is not a known platform", fix)
    if not platforms:
        problems.add("platforms", "no platform is listed", "cpu")
    problems.raise_any(ConfigError, "the model cannot be exported:")


def exported_for(made: Exportable, platforms: Sequence[str]) -> export.Exported:
    """The program of a function, of open sizes.

    Raises:
      ConfigError: it cannot be traced with them.
    """
    arrays = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in made.arrays.items()}
    # Parameters that only training uses, such as the last load of experts, are arguments too: the signature has all.
    program = jax.jit(made.apply, keep_unused=True)

    def attempt(dims: str) -> export.Exported:
        return export.export(program, platforms=platforms)(arrays, with_open_sizes(made, dims))

    def refused(error: Exception) -> ConfigError:
        what = f"it cannot be traced for any size of {made.dims[-1]}: {type(error).__name__}: {excerpt(str(error))}"
        return ConfigError(f"the model cannot be exported: {what}; pass a function of fixed sizes to jax.export")

    return first_of([partial(attempt, dims) for dims in made.dims], refused)


def with_open_sizes(made: Exportable, dims: str) -> Any:
    """The structs of the inputs, whose first dims have symbols as sizes."""
    sizes = export.symbolic_shape(dims, scope=export.SymbolicScope(made.limits))

    def open_sizes(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*sizes[: x.ndim], *x.shape[len(sizes) :]), x.dtype)

    return jax.tree.map(open_sizes, made.inputs)


def _written(name: str, x: jax.Array) -> Written:
    return Written(name, np.dtype(x.dtype), x.shape, partial(np.asarray, x))


def names(tree: Any, of_one: str) -> list[str]:
    """The paths of the arrays in a tree; `of_one` if the tree is one array."""
    return [path or of_one for path in flatten_with_paths(tree)]


def _signature(exported: export.Exported, made: Exportable) -> dict[str, Any]:
    num = len(made.arrays)

    def described(names: Sequence[str], avals: Sequence[Any]) -> list[dict[str, Any]]:
        shapes = [[size if isinstance(size, int) else str(size) for size in aval.shape] for aval in avals]
        return [
            {"name": name, "dtype": aval.dtype.name, "shape": shape}
            for name, aval, shape in zip(names, avals, shapes, strict=True)
        ]

    results = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    return {
        "format": "jax.export",
        "platforms": list(exported.platforms),
        "calling_convention_version": exported.calling_convention_version,
        "jax": version("jax"),
        "parameters": described(sorted(made.arrays), exported.in_avals[:num]),
        "inputs": described(names(made.inputs, made.of_input), exported.in_avals[num:]),
        "outputs": described(names(results, made.of_output), exported.out_avals),
    }
