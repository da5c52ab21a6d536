"""What a user's own model computes of the arrays that it is called with, for an export."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.errors import ConfigError
from meshpar.interop import user_code
from meshpar.interop.declared import lazily, unboxed
from meshpar.interop.flax_model import Import, one_row
from meshpar.interop.module import functions
from meshpar.interop.named_loss import ModelCall
from meshpar.interop.specs import Init
from meshpar.models.contract import Task
from meshpar.sharding.spec import ArraySpec


@dataclass(frozen=True)
class Forward:
    """A model in the mode of an evaluation.

    Args:
      apply: (params, carried, inputs) -> what the model returns.
      params, carried: trees of structs.
      inputs: name -> spec of each array that the model is called with, for one row.
    """

    apply: Callable[[Any, Any, Mapping[str, jax.Array]], Any]
    params: Any
    carried: Any
    inputs: Mapping[str, ArraySpec]


def forward_of(model: Import, task: Task) -> Forward:
    """The forward of a model as its loss calls it: with tokens, or with the arrays of rows by the names of its call.

    Raises:
      ConfigError: it is written for local shards; or a loss of its own calls it in another way.
    """
    if model.manual:
        raise ConfigError("model.manual: a model for local shards has no program for one device; model.manual=false")
    with user_code.blamed(model.target):
        return _of_tokens(model, task.seq_len) if task.arrays is None else _of_rows(model, task, task.arrays)


def _of_tokens(model: Import, seq_len: int) -> Forward:
    user, specs = model.built(seq_len), model.batch_specs(1, seq_len)

    def apply(params: Any, carried: Any, inputs: Mapping[str, jax.Array]) -> Any:
        with user_code.blamed(model.target):
            return user.apply(params, carried, [inputs[name] for name in model.called_with], False)[0]

    return Forward(apply, *_structs(user.init, user.carried), {name: specs[name] for name in model.called_with})


def _of_rows(model: Import, task: Task, arrays: Mapping[str, ArraySpec]) -> Forward:
    """By the names of the call: a loss by name calls the model so, and most losses of users."""
    labels = task.named.labels if task.named else ()
    module = model.module()
    call = ModelCall.of(module, model.target, model.inputs)
    try:
        given = call.inputs(one_row(arrays), labels)
    except ConfigError as error:
        raise ConfigError(f"{error}\n  or meshpar.export.function, with a function that calls the model") from None
    example = {name: jnp.zeros(spec.shape, spec.dtype) for name, spec in given.items()}

    def outputs(user: Any, inputs: Mapping[str, jax.Array]) -> Any:
        return call.outputs(user, inputs, labels)

    found = functions(module, outputs, outputs, example)
    evaluated = found.evaluation
    assert evaluated is not None

    def apply(params: Any, carried: Any, inputs: Mapping[str, jax.Array]) -> Any:
        with user_code.blamed(model.target):
            return evaluated(params, inputs, None, *([carried] if found.carried else []))

    return Forward(apply, *_structs(found.init, found.carried or (lambda key: {})), given)


def _structs(init: Init, carried: Init) -> tuple[Any, Any]:
    return unboxed(
        (jax.eval_shape(lazily(init), jax.random.key(0)), jax.eval_shape(lazily(carried), jax.random.key(0)))
    )
