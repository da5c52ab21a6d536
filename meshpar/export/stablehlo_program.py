"""Writes a trained model as a StableHLO program, with its parameters beside it.

model.jax           the program as `jax.export` serializes it; `jax.export.deserialize` reads it
model.mlirbc        the same program as StableHLO's portable bytecode, for other runtimes
model.safetensors   the parameters, by path
signature.json      names, dtypes, shapes and order of arguments and results
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from meshpar.errors import ConfigError, Problems, suggestion
from meshpar.export.forward import forward_of, open_model
from meshpar.interop.export import check_free, whole_or_not
from meshpar.interop.safetensors import Written, write
from meshpar.models.decoder import DecoderModel

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def stablehlo(source: Path | str, folder: Path | str, platforms: Sequence[str] = ("cpu",)) -> None:
    """Exports the last checkpoint of a run as a program for some platforms, of any batch size and length of rows.

    Args:
      source: a run directory, or the config of a run.
      folder: created, complete or not at all.
      platforms: some of `cpu`, `cuda`, `rocm` and `tpu`. Devices are not needed.

    Raises:
      ConfigError: lists the unknown platforms.
      CheckpointError: the folder exists, there is no checkpoint, or its model is not one of meshpar's decoders.

    Memory: the parameters, and a copy of one of them.
    """
    _check_platforms(platforms)
    folder = Path(folder)
    check_free(folder)
    run, model, params = open_model(Path(source))
    exported = program_of(model, run.precision.compute, params, platforms)
    with whole_or_not(folder) as made:
        (made / "model.jax").write_bytes(exported.serialize())
        (made / "model.mlirbc").write_bytes(exported.mlir_module_serialized)
        write(made / "model.safetensors", [_written(name, x) for name, x in params.items()])
        (made / "signature.json").write_text(json.dumps(_signature(exported, params), indent=2) + "\n")


def _check_platforms(platforms: Sequence[str]) -> None:
    problems = Problems()
    for name in platforms:
        if name not in PLATFORMS:
            fix = suggestion(name, PLATFORMS, f"there are {', '.join(PLATFORMS)}")
            problems.add("platforms", f"{name!r} is not a known platform", fix)
    if not platforms:
        problems.add("platforms", "no platform is listed", "cpu")
    problems.raise_any(ConfigError, "the model cannot be exported:")


def program_of(
    model: DecoderModel, compute: str, params: Mapping[str, Any], platforms: Sequence[str]
) -> export.Exported:
    """The forward of a decoder in the dtype `compute`, see `forward_of`, for tokens int32[batch, seq] of any sizes.

    Args:
      params: path -> array or struct.
    """
    limits = [f"seq <= {model.max_seq_len}"] if model.learned_positions else []
    batch, seq = export.symbolic_shape("batch, seq", constraints=limits)
    structs = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in params.items()}
    tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    # Parameters that only training uses, such as the last load of experts, are arguments too: the signature has all.
    program = jax.jit(forward_of(model, compute), keep_unused=True)
    return export.export(program, platforms=platforms)(structs, tokens)


def _written(name: str, x: jax.Array) -> Written:
    return Written(name, np.dtype(x.dtype), x.shape, partial(np.asarray, x))


def _signature(exported: export.Exported, params: Mapping[str, jax.Array]) -> dict[str, Any]:
    *given, tokens = exported.in_avals
    (logits,) = exported.out_avals

    def described(name: str, aval: Any) -> dict[str, Any]:
        shape = [size if isinstance(size, int) else str(size) for size in aval.shape]
        return {"name": name, "dtype": aval.dtype.name, "shape": shape}

    return {
        "format": "jax.export",
        "platforms": list(exported.platforms),
        "calling_convention_version": exported.calling_convention_version,
        "jax": version("jax"),
        "parameters": [described(name, aval) for name, aval in zip(sorted(params), given, strict=True)],
        "inputs": [described("tokens", tokens)],
        "outputs": [described("logits", logits)],
    }
