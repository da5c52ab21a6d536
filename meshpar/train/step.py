"""The step: gradients of either lowering, then the optimizer; compiled before anything is allocated."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from inspect import Parameter, signature
from typing import Any

import jax
import jax.numpy as jnp
import optax

from meshpar.errors import ConfigError
from meshpar.optim.freeze import as_in, filled
from meshpar.train.gradients import Gradients
from meshpar.train.loss import Batch
from meshpar.train.program import Program, compile_program, shardings, structs, trace, whole, with_rows
from meshpar.train.state import StatePlacement, TrainState

Metrics = dict[str, jax.Array]


@dataclass(frozen=True)
class Update:
    """The optimizer's half of a step.

    It runs under GSPMD, not in the manual region: Optax chains are mathematics on whole arrays (Adafactor's
    factored means, Muon's orthogonalization), and an elementwise chain on sharded state communicates nothing.

    Args:
      tx: any Optax chain, without clipping; it may take the keyword `step`, int32[].
      clip_norm: the largest norm of the whole gradient; None for no limit.
      dtype: in which `tx` computes; None for that of the parameters.
      learning_rate: number of updates -> learning rate, to report it; None if it is not known.
    """

    tx: optax.GradientTransformation
    clip_norm: float | None = None
    learning_rate: Callable[[jax.Array], Any] | None = None
    dtype: Any = None

    def __call__(
        self, state: TrainState, got: Gradients, sharded: Any, elsewhere: Callable[[Any], Gradients] | None = None
    ) -> tuple[TrainState, Metrics]:
        """The next state; the present one, if loss or gradients are not finite.

        Args:
          elsewhere: trained parameters -> the gradients of the same batch there, for optimizers that ask for more than
            one: line searches (`value_fn`) and sharpness-aware minimization (`grad_fn`).
        """
        trained = as_in(got.grads, state.params)
        grads = jax.tree.map(
            lambda g, p: (g * self._scale(got.norm).astype(g.dtype)).astype(self.dtype or p.dtype), got.grads, trained
        )
        # ZeRO-1 stores parameters whole, but each device updates only its shard.
        old = jax.lax.with_sharding_constraint(trained, sharded)
        with jax.numpy_dtype_promotion("standard"):  # Optax mixes floats with integer step counts
            tx = optax.with_extra_args_support(self.tx)
            given = {"value": got.loss, "grad": grads, "step": state.step}
            if elsewhere:
                given |= asked_again(elsewhere)
            given = {name: x for name, x in given.items() if _takes(tx, name)}
            try:
                updates, opt_state = tx.update(grads, state.opt_state, old, **given)
            except TypeError as error:
                raise _refused(error, given) from error
            params = jax.lax.with_sharding_constraint(optax.apply_updates(old, updates), sharded)
        finite = jnp.isfinite(got.norm) & jnp.isfinite(got.loss)
        keep = lambda new, old: jnp.where(finite, new, old)
        new = TrainState(
            step=state.step + 1,
            params=filled(jax.lax.with_sharding_constraint(jax.tree.map(keep, params, old), sharded), state.params),
            opt_state=jax.tree.map(keep, opt_state, state.opt_state),
            skipped=state.skipped + jnp.where(finite, 0, 1).astype(jnp.int32),
            carried=jax.tree.map(keep, got.carried, state.carried),
        )
        metrics = {"loss": got.loss, "grad_norm": got.norm, "tokens": got.tokens, "skipped": new.skipped}
        return new, got.metrics | metrics | self._rate(state)

    def _rate(self, state: TrainState) -> Metrics:
        if self.learning_rate is None:
            return {}
        with jax.numpy_dtype_promotion("standard"):
            return {"lr": jnp.asarray(self.learning_rate(state.step - state.skipped), jnp.float32)}

    def _scale(self, norm: jax.Array) -> jax.Array:
        if self.clip_norm is None:
            return jnp.ones_like(norm)
        return jnp.minimum(1.0, self.clip_norm / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))


def asked_again(elsewhere: Callable[[Any], Gradients]) -> dict[str, Callable[..., Any]]:
    """Optax's `value_fn` and `grad_fn`: the loss and its gradient at other parameters, on the same batch."""

    def grad_fn(params: Any, *_: Any) -> Any:
        return jax.tree.map(lambda g, p: g.astype(p.dtype), elsewhere(params).grads, params)

    @jax.custom_vjp
    def loss(params: Any) -> jax.Array:
        return elsewhere(params).loss

    def forward(params: Any) -> tuple[jax.Array, Any]:
        got = elsewhere(params)
        return got.loss, jax.tree.map(lambda g, p: g.astype(p.dtype), got.grads, params)

    def backward(grads: Any, cotangent: jax.Array) -> tuple[Any]:
        return (jax.tree.map(lambda g: g * cotangent.astype(g.dtype), grads),)

    loss.defvjp(forward, backward)

    def value_fn(params: Any, *, step: Any = None, grad_fn: Any = None) -> jax.Array:
        return loss(params)  # Optax's line search refuses what an update is given and this function is not

    return {"value_fn": value_fn, "grad_fn": grad_fn}


def _takes(tx: optax.GradientTransformationExtraArgs, name: str) -> bool:
    """Whether an update has an argument; some, as SAM's, do not take those that they do not know."""
    parameters = signature(tx.update).parameters.values()
    return any(parameter.kind is Parameter.VAR_KEYWORD or parameter.name == name for parameter in parameters)


def _refused(error: TypeError, given: Mapping[str, Any]) -> Exception:
    """What is raised where an optimizer refuses what it is given, or asks for more."""
    if not re.search("keyword|value_fn", str(error)):
        return error
    what = f"this optimizer does not take what an update is given, {', '.join(given)}, or asks for more: {error}"
    return ConfigError(f"{what}; optax.contrib.sam goes by itself, outside of optax.chain")


@dataclass(frozen=True)
class Step:
    """A compiled training step: `state, metrics = step(state, batch)`. The state is donated.

    Args:
      program: the step's.
      batch: tree of `ShapeDtypeStruct`: the batch it takes.
      given: what every call gets alongside its batch: name -> tree of arrays, or of structs until they exist.
    """

    program: Program
    batch: dict[str, jax.ShapeDtypeStruct]
    given: dict[str, Any] = field(default_factory=dict)

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        return self.compiled(state, batch | self.given)

    @property
    def compiled(self) -> jax.stages.Compiled:
        """The executable."""
        return self.program.compiled

    @property
    def text(self) -> str:
        """The optimized program."""
        return self.compiled.as_text() or ""


def step_function(
    gradients: Callable[..., Gradients], update: Update, placement: StatePlacement
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The step before it is compiled: enough to trace it for a machine that is not here.

    Args:
      gradients: (params, batch, step, carried) -> `Gradients`, see `train.gradients`.
    """
    sharded = shardings(structs(placement.trained))

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        def at(params: Any) -> Gradients:
            got = gradients(filled(params, state.params), with_rows(batch), state.step, state.carried)
            return replace(got, grads=jax.lax.with_sharding_constraint(got.grads, sharded))

        return update(state, at(state.params), sharded, at)

    return step


def compile_step(
    step: Callable[..., Any],
    placement: StatePlacement,
    batch: dict[str, jax.ShapeDtypeStruct],
    given: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
) -> Step:
    """Compiles a step from placements alone; no array exists yet.

    Args:
      batch: structs with shardings, see `batch_structs`.
      given: what every call gets alongside its batch, trees of structs.
      options: the compiler's.
    """
    state = placement.structs
    out = (shardings(state), whole(placement.mesh))
    traced = trace(step, (state, batch | (given or {})), out, donate=(0,))
    return Step(compile_program(traced, options), batch, given or {})
