"""A Flax module and a loss `(model, batch)` or `(model, batch, key)`, as the functions that `training` takes.

The loss calls the model as it would on one device: `model(batch["x"])`. A Linen module is initialized by the first call
of the loss, so it needs no example of its inputs. State that the forward changes, such as batch statistics, is carried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.core.scope import in_filter, union_filters

from meshpar.errors import ConfigError
from meshpar.train.loss import LossSums

ModelLoss = Callable[..., Any]
"""(model, batch) or (model, batch, key) -> what a loss of `training` returns, without carried state."""


@dataclass(frozen=True)
class Functions:
    """A model and its losses as functions of parameters, see `meshpar.training`.

    Args:
      carried: None if the forward changes nothing.
      draws: whether the loss gets a key.
      of_rows: (params, batch, key, carried) -> what metrics of all rows together need; None if there are none.
      bounds: array of labels -> the number of classes.
    """

    init: Callable[[jax.Array], Any]
    loss: Callable[..., Any]
    evaluation: Callable[..., Any] | None
    carried: Callable[[jax.Array], Any] | None
    draws: bool
    of_rows: Callable[..., Any] | None = None
    bounds: Mapping[str, int] = field(default_factory=dict)


def is_module(subject: Any) -> bool:
    """Whether it is a Flax model: a module of Linen or NNX, or a function with an argument `rngs` that returns one."""
    if isinstance(subject, (nn.Module, nnx.Module)):
        return True
    return callable(subject) and "rngs" in _parameters(subject)


def functions(module: Any, loss: ModelLoss, evaluation: ModelLoss | None, batch: Mapping[str, Any]) -> Functions:
    """The functions of a module.

    Args:
      evaluation: the loss of an evaluation. Default: `loss`, with an NNX model in the mode `eval`.

    Raises:
      ConfigError: a loss has other parameters.
    """
    for name, one in {"loss": loss, "evaluation": evaluation}.items():
        if one and len(_parameters(one)) not in (2, 3):
            raise ConfigError(f"{name}: a loss of a Flax module is def {name}(model, batch), or (model, batch, key)")
    make = _of_linen if isinstance(module, nn.Module) else _of_nnx
    return make(module, loss, evaluation or loss, batch)


def _parameters(function: Callable[..., Any]) -> Mapping[str, Any]:
    if isinstance(function, partial) and isinstance(function.func, type):  # the signature of an NNX class is unknown
        function = partial(function.func.__init__, None, *function.args, **function.keywords)
    try:
        return signature(function.__init__ if isinstance(function, type) else function).parameters
    except ValueError:  # a builtin without a signature
        return {}


def _called(loss: ModelLoss, model: Any, batch: Any, key: Any) -> Any:
    return loss(model, batch, key) if len(_parameters(loss)) == 3 else loss(model, batch)


def _with_carried(result: Any, carried: Any) -> Any:
    """The result of a loss, with the state that its forward left."""
    if isinstance(result, LossSums):
        return replace(result, carried=carried)
    mean, metrics = result if isinstance(result, tuple) else (result, {})
    return mean, metrics, carried


def _of_linen(module: nn.Module, loss: ModelLoss, evaluation: ModelLoss, batch: Mapping[str, Any]) -> Functions:
    example = {name: jnp.asarray(x) for name, x in batch.items()}

    def variables(key: jax.Array) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def model(*args: Any, mutable: Any = False, **kwargs: Any) -> Any:
            if found:  # a second call, such as that of a teacher
                return _applied(module, found, {}, mutable, args, kwargs)
            rngs = {"params": key} | kwargs.pop("rngs", {})
            kept = union_filters(nn.DenyList("intermediates"), mutable)
            out, new = module.init_with_output(rngs, *args, **kwargs, mutable=kept)
            found.update({name: value for name, value in new.items() if name != "intermediates"})
            return (out, _asked(new, mutable)) if mutable else out

        _called(loss, model, example, key)
        if "params" not in found:
            raise ConfigError("loss: it does not call its model, so that the model has no parameters")
        return found

    def others(key: jax.Array) -> dict[str, Any]:
        return {name: value for name, value in variables(key).items() if name in changing}

    changing = _changing(variables, partial(_called, loss), module, example)

    def apply(params: Any, state: dict[str, Any], is_training: bool) -> Callable[..., Any]:
        def model(*args: Any, mutable: Any = False, **kwargs: Any) -> Any:
            held = {"params": params, **state}
            return _applied(module, held, state if is_training else {}, mutable, args, kwargs)

        return model

    def trained(params: Any, batch: Any, key: Any, carried: Any = None) -> Any:
        state = dict(carried or {})
        result = _called(loss, apply(params, state, True), batch, key)
        return _with_carried(result, state) if changing else result

    def evaluated(params: Any, batch: Any, key: Any, carried: Any = None) -> Any:
        return _called(evaluation, apply(params, dict(carried or {}), False), batch, key)

    draws = len(_parameters(loss)) == 3
    first = (lambda key: variables(key)["params"]), (others if changing else None)
    return Functions(first[0], trained, evaluated, first[1], draws)


def _applied(module: nn.Module, held: Any, state: dict[str, Any], mutable: Any, args: Any, kwargs: Any) -> Any:
    """Calls a Linen module, and updates `state`. With `mutable` it also returns these collections, as Flax does."""
    if not state and not mutable:
        return module.apply(held, *args, **kwargs)
    out, new = module.apply(held, *args, **kwargs, mutable=union_filters(list(state), mutable))
    state.update({name: new[name] for name in state})
    return (out, _asked(new, mutable)) if mutable else out


def _asked(collections: Mapping[str, Any], mutable: Any) -> dict[str, Any]:
    return {name: value for name, value in collections.items() if in_filter(mutable, name)}


def _changing(variables: Callable[..., Any], call: Callable[..., Any], module: nn.Module, batch: Any) -> frozenset[str]:
    """The collections that the forward changes. What it sows is none of them: each call would add to it."""
    key = jax.random.key(0)
    first = jax.eval_shape(variables, key)
    if not {*first} - {"params"}:
        return frozenset()

    def after(held: Any) -> Any:
        state = {name: value for name, value in held.items() if name != "params"}
        call(lambda *args, mutable=False, **kwargs: _applied(module, held, state, mutable, args, kwargs), batch, key)
        return state

    then = jax.eval_shape(after, first)
    return frozenset(name for name in then if jax.tree.structure(then[name]) == jax.tree.structure(first[name]))


def _of_nnx(module: Any, loss: ModelLoss, evaluation: ModelLoss, batch: Mapping[str, Any]) -> Functions:
    def built(key: jax.Array) -> nnx.Module:
        return module if isinstance(module, nnx.Module) else module(rngs=nnx.Rngs(key))

    def abstract() -> tuple[Any, Any]:
        with nnx.use_eager_sharding(False):
            return nnx.split(nnx.eval_shape(lambda: built(jax.random.key(0))))

    graph, state = abstract()
    changes = bool(jax.tree.leaves(nnx.filter_state(state, nnx.Not(nnx.Param))))

    def merged(params: Any, carried: Any) -> Any:
        return nnx.merge(graph, params, carried) if changes else nnx.merge(graph, params)

    def trained(params: Any, batch: Any, key: Any, carried: Any = None) -> Any:
        model = merged(params, carried)
        model.train()
        result = _called(loss, model, batch, key)
        return _with_carried(result, _without_sown(model, state)) if changes else result

    def evaluated(params: Any, batch: Any, key: Any, carried: Any = None) -> Any:
        model = merged(params, carried)
        model.eval()
        return _called(evaluation, model, batch, key)

    def first(kind: Any) -> Callable[[jax.Array], Any]:
        return lambda key: nnx.state(built(key), kind)

    draws = len(_parameters(loss)) == 3
    return Functions(first(nnx.Param), trained, evaluated, first(nnx.Not(nnx.Param)) if changes else None, draws)


def _without_sown(model: nnx.Module, first: Any) -> Any:
    """The state of a model beside its parameters, without what its forward sowed: `Intermediate`s that are new."""
    known = {path for path, _ in nnx.to_flat_state(first)}
    state = nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.Param)))
    kept = [(path, x) for path, x in state if path in known or not isinstance(x, nnx.Intermediate)]
    return nnx.from_flat_state(kept)
