"""The training of a model that a config imports: its specs, its init and its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, signature
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from meshpar.errors import ConfigError, Problems, nearest
from meshpar.interop import user_code
from meshpar.interop.declared import lazily, unboxed
from meshpar.interop.keys import key_implementations
from meshpar.interop.training import Init, arrays_of, check_axes, specs_of, takes, tallied, with_axes
from meshpar.models.imported import Import
from meshpar.sharding.rules import AxisRules
from meshpar.train.data.packing import ARRAYS
from meshpar.train.loss import Batch, Criterion, Loss, Tally, next_token_loss


@dataclass(frozen=True)
class Imported:
    """What a user's model is to a training; see `Training` for the fields.

    Args:
      vocab_size: how many token ids the logits are of; None where the loss is the user's own.
    """

    specs: Any
    init: Init
    loss: Loss
    evaluation: Loss
    carried: Any
    init_carried: Init
    rules: AxisRules
    draws: bool
    vocab_size: int | None


@dataclass(frozen=True)
class _Model:
    """A user's model, of Linen or of NNX.

    Args:
      made: the Linen module, or the `GraphDef` of the NNX one.
      init: key -> parameters.
      carried: key -> what the forward changes.
      apply: (params, carried, tokens, whether it learns) -> logits and what is carried on.
    """

    made: Any
    init: Init
    carried: Init
    apply: Callable[[Any, Any, jax.Array, bool], tuple[jax.Array, Any]]


def imported(model: Import, criterion: Criterion, rules: AxisRules, seq_len: int, seed: int) -> Imported:
    """Imports a model, and its loss if there is one of its own, and asks what its arrays are.

    Args:
      criterion: its target is (model, params, batch, key) -> as of `meshpar.training`; the model is the Linen module,
        or the `GraphDef` of the NNX one. With collections that change there is a fifth argument, `carried`, and a third
        result. Default: the next token's cross entropy of the logits, `model(tokens)`.

    Raises:
      ConfigError: the target is no Flax model, or was not permitted to be imported.
    """
    check_axes(model.axes)
    with user_code.blamed(model.target):
        user = _built(model, seq_len)
        specs, carried = specs_of(user.init, user.carried, seed, model.dims)
        keys = key_implementations(jax.eval_shape(lazily(user.carried), jax.random.key(seed)))
    as_sums = partial(tallied, arrays=set(ARRAYS), carries=bool(carried), keys=keys, axes=model.axes)
    if criterion.target is None:
        if carried and isinstance(user.made, nn.Module):
            what = f"{model.target} has collections that change: {', '.join(map(str, carried))}"
            raise ConfigError(f"{what}; it needs a loss of its own, loss: package.module:name")
        vocab_size = _vocab_size(model, user, seq_len)
        of_rows = as_sums(_next_token(model.target, user, partial(criterion.build, vocab_size=vocab_size), True))
        plain = as_sums(_next_token(model.target, user, partial(next_token_loss, vocab_size=vocab_size), False))
    else:
        vocab_size = None
        of_rows, plain = (
            as_sums(_own(criterion.target, user.made, bool(carried)), hands_on=on) for on in (True, False)
        )
    return Imported(
        specs, arrays_of(user.init), of_rows, plain, carried, arrays_of(user.carried),
        with_axes(rules, model.axes, (specs, carried)), criterion.target is not None, vocab_size,
    )  # fmt: skip


def _next_token(target: str, user: _Model, build: Callable[..., Loss], learns: bool) -> Callable[..., Tally]:
    """The loss of the next token, as a user would write it."""

    def loss(params: Any, batch: Batch, key: jax.Array | None, carried: Any = None) -> Tally:
        with user_code.blamed(target):
            logits, after = user.apply(params, carried or {}, batch["tokens"], learns)
        tally = build(lambda params, batch, key: logits)(params, batch, key, {})
        return replace(tally, carried=after)

    return loss


def _own(target: str, made: Any, carries: bool) -> Callable[..., Any]:
    """The loss that a config names."""
    given = user_code.load(target)
    arguments = ("model", "params", "batch", "key", *(["carried"] if carries else []))
    if not takes(given, len(arguments)):
        name = target.rpartition(":")[2]
        raise ConfigError(f"{target} is called with {len(arguments)} arguments; def {name}({', '.join(arguments)})")

    def loss(*arguments: Any) -> Any:
        with user_code.blamed(target):
            return given(made, *arguments)

    return loss


def _built(model: Import, seq_len: int) -> _Model:
    build = user_code.load(model.target)
    if not callable(build):
        raise ConfigError(f"{model.target} is {type(build).__name__}; give a function that makes a Flax model")
    parameters = signature(build.__init__ if isinstance(build, type) else build).parameters
    own = ("self", "parent", "name") if isinstance(build, type) else ()  # Linen's modules have the last two
    _check_arguments(model, {name: p for name, p in parameters.items() if name not in own})
    if "rngs" in parameters:
        return _of_nnx(partial(build, **model.arguments))
    made = build(**model.arguments)
    if isinstance(made, nn.Module):
        return _of_linen(made, seq_len)
    what = f"{model.target} gives {type(made).__name__}, which is no Linen module, and takes no rngs, as NNX's do"
    raise ConfigError(f"{what}; give a function that makes a Flax model")


def _check_arguments(model: Import, parameters: Mapping[str, Parameter]) -> None:
    """Holds the arguments of the config against those of the user's function."""
    problems = Problems()
    by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    named = {name: p for name, p in parameters.items() if name != "rngs" and p.kind in by_name}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    listed = f"it takes {', '.join(named)}" if named else "it takes none"
    for name in model.arguments:
        if name not in named and not takes_any:
            near = nearest(name, named)
            fix = f"did you mean {near}?" if near else listed
            problems.add(f"model.arguments.{name}", f"{model.target} has no such argument", fix)
    for name, parameter in named.items():
        if parameter.default is Parameter.empty and name not in model.arguments:
            problems.add(f"model.arguments.{name}", f"{model.target} requires it", listed)
    problems.raise_any(ConfigError, f"{model.target} cannot be called with these arguments:")


def _of_linen(made: nn.Module, seq_len: int) -> _Model:
    tokens = jnp.zeros((1, seq_len), jnp.int32)

    def variables(key: jax.Array) -> dict[str, Any]:
        return dict(made.init(key, tokens))

    def carried(key: jax.Array) -> dict[str, Any]:
        return {name: value for name, value in variables(key).items() if name != "params"}

    def apply(params: Any, carried: Any, tokens: jax.Array, learns: bool) -> tuple[jax.Array, Any]:
        return made.apply({"params": params}, tokens), carried  # pyright: ignore

    return _Model(made, lambda key: variables(key)["params"], carried, apply)


def _of_nnx(build: Callable[..., nnx.Module]) -> _Model:
    with nnx.use_eager_sharding(False):
        graph = nnx.graphdef(nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0))))

    def init(key: jax.Array) -> Any:
        return nnx.state(build(rngs=nnx.Rngs(key)), nnx.Param)

    def carried(key: jax.Array) -> Any:
        return nnx.state(build(rngs=nnx.Rngs(key)), nnx.Not(nnx.Param)) or {}

    def apply(params: Any, carried: Any, tokens: jax.Array, learns: bool) -> tuple[jax.Array, Any]:
        model = nnx.merge(graph, params, carried) if carried else nnx.merge(graph, params)
        if learns:
            model.train()
        else:
            model.eval()
        logits = model(tokens)  # pyright: ignore
        return logits, nnx.state(model, nnx.Not(nnx.Param)) if carried else carried

    return _Model(graph, init, carried, apply)


def _vocab_size(model: Import, user: _Model, seq_len: int) -> int:
    tokens = jax.ShapeDtypeStruct((1, seq_len), jnp.int32)

    def logits(key: jax.Array, tokens: jax.Array) -> Any:
        params, carried = unboxed(lazily(user.init)(key)), unboxed(lazily(user.carried)(key))
        return user.apply(params, carried, tokens, False)[0]

    with user_code.blamed(model.target):
        found = jax.eval_shape(logits, jax.random.key(0), tokens)
    if getattr(found, "ndim", 0) != 3:
        shape = getattr(found, "shape", type(found).__name__)
        raise ConfigError(f"{model.target}: model(tokens[1, {seq_len}]) gives {shape}, not logits [batch, seq, vocab]")
    return found.shape[-1]
