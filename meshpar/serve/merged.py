"""Restores the parameters of a run that trained LoRA, with each update added to its kernel."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from meshpar.checkpoint.saved import Checkpoint
from meshpar.convert import merged, restore_params
from meshpar.experiment.config import Run
from meshpar.experiment.validate import task_of
from meshpar.nn.lora import LoRA, is_lora
from meshpar.parallel.precision import stored_in
from meshpar.serve.on_mesh import for_tokens
from meshpar.sharding.resolve import resolve
from meshpar.train.program import compile_program, structs, trace
from meshpar.train.state import stored
from meshpar.tree import flatten_with_paths, map_with_path

Arrays = dict[str, Any]
"""Path -> array, or its struct."""


def restore_merged(run: Run, lora: LoRA, saved: Checkpoint, plain: Any) -> Any:
    """The parameters of the model without LoRA, from a checkpoint of a run with it.

    Args:
      plain: tree of structs with shardings, of the model without LoRA.

    Memory: the matrices of LoRA besides the parameters, sharded by the same rules.
    Numerics: see `LoRA.merged`.
    """
    mesh = jax.tree.leaves(plain)[0].sharding.mesh
    rules = for_tokens(run.context(mesh)).rules
    program = run.model.program(task_of(run))
    wide_paths = program.state.paths if program.state else ()
    specs = stored_in(program.specs, np.dtype(run.precision.params), wide_paths)
    adapted = structs(stored(resolve(specs, rules, mesh), rules))
    params = flatten_with_paths(restore_params(saved, adapted))
    updates = {path: params.pop(path) for path in list(params) if is_lora(path)}

    def merge(params: Arrays, updates: Arrays) -> Arrays:
        return merged(run, params | updates)[1]

    placed = {path: struct.sharding for path, struct in flatten_with_paths(plain).items()}
    is_of_floats = placed.keys() == params.keys()  # codes cannot become the floats that they stand for in place
    compiled = compile_program(trace(merge, (params, updates), placed, donate=(0,) if is_of_floats else ()))
    found = compiled(params, updates)
    return map_with_path(lambda path, _: found[path], plain)
