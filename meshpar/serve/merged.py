"""Restores the parameters of a run that trained LoRA, with each update added to its kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from meshpar.checkpoint.saved import Checkpoint
from meshpar.convert import restore_params
from meshpar.experiment.config import Run
from meshpar.experiment.validate import task_of
from meshpar.nn.lora import is_lora
from meshpar.parallel.precision import stored_in
from meshpar.serve.on_mesh import ACTIVATION_DIMS, for_tokens, placements
from meshpar.train.program import compile_program, structs, trace
from meshpar.tree import flatten_with_paths, map_with_path

Arrays = dict[str, Any]
"""Path -> array, or its struct."""


def restore_merged(run: Run, saved: Checkpoint, plain: Any) -> Any:
    """The parameters of the model without LoRA, from a checkpoint of a run with it.

    Args:
      plain: tree of structs with shardings, of the model without LoRA.

    Memory: the matrices of LoRA besides the parameters, sharded by the same rules.
    Numerics: see `LoRA.merged`.
    """
    mesh = jax.tree.leaves(plain)[0].sharding.mesh
    program = run.model.program(replace(task_of(run), mesh=mesh))
    merging = program.merged
    assert merging, "a run with LoRA"
    ctx = for_tokens(replace(run.context(mesh), rules=program.rules))
    wide_paths = program.state.paths if program.state else ()
    specs = stored_in(program.specs, np.dtype(run.precision.params), wide_paths)
    of_activations = program.activation_dims
    if of_activations is not None:
        of_activations = (*of_activations, *ACTIVATION_DIMS)
    nested = structs(placements(specs, ctx, of_activations))
    params = flatten_with_paths(restore_params(saved, nested))
    updates = {path: params.pop(path) for path in list(params) if is_lora(path)}

    def merge(params: Arrays, updates: Arrays) -> Mapping[str, jax.Array]:
        return merging(map_with_path(lambda path, _: (params | updates)[path], nested))

    placed = {path: struct.sharding for path, struct in flatten_with_paths(plain).items()}
    is_of_floats = placed.keys() == params.keys()  # codes cannot become the floats that they stand for in place
    compiled = compile_program(trace(merge, (params, updates), placed, donate=(0,) if is_of_floats else ()))
    found = compiled(params, updates)
    return map_with_path(lambda path, _: found[path], plain)
