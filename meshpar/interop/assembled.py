"""Makes a training's arrays and losses of a user's functions: names for dims, LoRA, and rules for what they add."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from meshpar.interop.adapters import Adapters, with_rank
from meshpar.interop.inferred import with_inferred
from meshpar.interop.kinds import kinds_of
from meshpar.interop.losses import on_batch, with_loss_sums
from meshpar.interop.module import Functions
from meshpar.interop.specs import UserSpecs, arrays_of, with_axes
from meshpar.models.contract import ModelProgram
from meshpar.nn.lora import LoRA
from meshpar.parallel.data import gather_in_layer
from meshpar.parallel.precision import stored_in
from meshpar.sharding.resolve import AnyMesh, with_largest
from meshpar.sharding.rules import AxisRules
from meshpar.sharding.spec import ArraySpec


def assembled(
    user: Functions,
    found: UserSpecs,
    arrays: Mapping[str, ArraySpec],
    rules: AxisRules,
    *,
    axes: Mapping[str, str],
    key: Any,
    mesh: AnyMesh | None,
    infers: bool,
    lora: LoRA | None,
    needs_kinds: bool = False,
    params_dtype: Any = None,
    gathers: bool = False,
    returns_carried: bool = False,
) -> tuple[ModelProgram, Any]:
    """Returns a user's model as one that is trained, and the tree of `Matrix` of its parameters, None if not needed.

    Args:
      found: the specs of the parameters and of the carried state.
      arrays: of a batch.
      key: the struct of the loss's key; None if it draws nothing.
      mesh: on which the rule `largest` divides; None where no program is made.
      infers: whether dims without names get those of their use.
      needs_kinds: whether the kinds of the parameters are needed without LoRA too.
      gathers: whether the losses are written for local shards, and parameters stored in shards are gathered for them.
      returns_carried: whether an evaluation returns the next carried state.
    """
    carried, carries = found.carried, user.carried is not None
    given = {"carries": carries, "keys": found.keys, "axes": axes}
    specs = found.specs
    if infers:
        sums = with_loss_sums(user.loss, (specs, arrays, carried), **given)
        specs = with_inferred(sums, specs, arrays, key, carried)
    if params_dtype is not None:
        specs = stored_in(specs, np.dtype(params_dtype))
    specs = with_largest(specs, rules, mesh) if mesh else specs
    as_sums = partial(with_loss_sums, specs=(specs, arrays, carried), **given)
    wrapped = partial(_gathered, dims=jax.tree.map(lambda spec: spec.dims, specs)) if gathers else lambda loss: loss
    sums = as_sums(wrapped(user.loss))
    evaluated = user.evaluation and as_sums(wrapped(user.evaluation), returns_carried=returns_carried)
    of_rows = user.of_rows and on_batch(user.of_rows, (specs, arrays, carried), **given)
    init, merged = arrays_of(user.init, axes), None
    kinds = kinds_of(sums, specs, arrays, key, carried) if lora or needs_kinds else None
    if lora:
        adapters = Adapters.of(lora, specs, kinds)
        specs, kinds, init = adapters.specs(specs), adapters.kinds(kinds), adapters.init(init)
        sums, evaluated = adapters.loss(sums), evaluated and adapters.loss(evaluated)
        of_rows = of_rows and adapters.loss(of_rows)
        merged, rules = adapters.merged_by_path, with_rank(rules)
    program = ModelProgram(
        specs=specs,
        init=init,
        loss=sums,
        evaluation=evaluated or sums,
        rules=with_axes(rules, axes, (specs, carried)),
        uses_rng=user.draws,
        carried=carried,
        init_carried=arrays_of(user.carried, axes) if user.carried else lambda key: {},
        of_rows=of_rows,
        bounds=user.bounds,
        merged=merged,
    )
    return program, kinds


def _gathered(loss: Callable[..., Any], dims: Any) -> Callable[..., Any]:
    """Wraps a loss so that parameters stored in shards are gathered before its forward, in the manual lowering.

    Memory: all gathered parameters at once, as under ZeRO-2.
    """

    def gathered_loss(params: Any, *arguments: Any) -> Any:
        return loss(gather_in_layer(params, dims), *arguments)

    return gathered_loss
