"""The training step: gradients, then the optimizer. It is compiled before anything is allocated."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from inspect import Parameter, signature
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from meshpar.errors import ConfigError
from meshpar.inspection.program.compiling import compiling
from meshpar.parallel.trainable import as_in, filled
from meshpar.parallel.xla import without_copy
from meshpar.sharding.resolve import platform_of
from meshpar.train.batches import arranged
from meshpar.train.gradients import Gradients
from meshpar.train.loss import Batch
from meshpar.train.program import Program, compile_program, shardings, structs, trace, whole, with_rows
from meshpar.train.state import StatePlacement, TrainState, on_device
from meshpar.train.stored_layers import StoredLayers

Metrics = dict[str, jax.Array]

IN_FLIGHT = 8
"""The largest number of steps in flight. With more than about 32 on simulated devices, jax 0.10 hangs."""


class StateParams(Protocol):
    """Parameters of a model that each step changes by the metrics of the layers, without a gradient."""

    @property
    def paths(self) -> tuple[str, ...]: ...
    def after_step(self, params: Any, metrics: Metrics, tokens: jax.Array) -> tuple[Any, Metrics]:
        """The parameters for the next step, and the metrics to report."""
        ...


@dataclass(frozen=True)
class Update:
    """The optimizer's half of a step.

    It runs under GSPMD, not in the manual region: Optax chains are mathematics on whole arrays (Adafactor's
    factored means, Muon's orthogonalization), and an elementwise chain on sharded state communicates nothing.

    Args:
      tx: any Optax chain, without clipping; its update may have the keyword `step`, int32[].
      clip_norm: the largest global norm of the gradients; None for no limit.
      dtype: dtype in which `tx` computes; None for that of the parameters.
      state_params: frozen parameters that the step itself changes; None if there are none.
      is_elementwise: whether `tx` updates each element by itself, and its state without the parameters.
      learning_rate: number of updates -> learning rate, for the metrics; None if it is not known.
    """

    tx: optax.GradientTransformation
    clip_norm: float | None = None
    learning_rate: Callable[[jax.Array], Any] | None = None
    dtype: Any = None
    state_params: StateParams | None = None
    is_elementwise: bool = False

    def __call__(
        self,
        state: TrainState,
        computed: Gradients,
        sharded: Any,
        gradients_at: Callable[[Any], Gradients] | None = None,
    ) -> tuple[TrainState, Metrics]:
        """The next state. A loss or gradients that are not finite change only the counters.

        Args:
          gradients_at: trained parameters -> gradients of the same batch at them, for optimizers that need several
            gradients per step: line searches (`value_fn`) and sharpness-aware minimization (`grad_fn`).
        """
        trained = as_in(computed.grads, state.params)
        scale = jnp.ones_like(computed.norm)
        if self.clip_norm is not None:
            scale = jnp.minimum(1.0, self.clip_norm / jnp.maximum(computed.norm, jnp.finfo(computed.norm.dtype).tiny))

        def scaled(g: jax.Array, p: jax.Array) -> jax.Array:
            return (g * scale.astype(g.dtype)).astype(self.dtype or p.dtype)

        # ZeRO-1 stores parameters whole, but each device updates only its shard.
        old = jax.lax.with_sharding_constraint(trained, sharded)

        @partial(jax.jit, inline=True)  # a second call does not trace it again
        def updated(sums: Any, opt_state: Any) -> tuple[Any, Any]:
            grads = jax.tree.map(scaled, sums, trained)
            with jax.numpy_dtype_promotion("standard"):  # Optax mixes floats with integer step counts
                updates, opt_state = self._updates(grads, opt_state, old, state.step, computed.loss, gradients_at)
                return jax.lax.with_sharding_constraint(optax.apply_updates(old, updates), sharded), opt_state

        params, opt_state = updated(computed.grads, state.opt_state)
        is_finite = jnp.isfinite(computed.norm) & jnp.isfinite(computed.loss)
        params = jax.lax.with_sharding_constraint(jax.tree.map(partial(jnp.where, is_finite), params, old), sharded)
        moments = state.opt_state
        if platform_of(jax.tree.leaves(sharded)[0].mesh) == "cpu":
            params, is_finite, moments = without_copy((params, is_finite, moments))
            if self.is_elementwise:
                # Else it would store the new moments with which it computes parameters, and read them to select.
                _, opt_state = updated(computed.grads, moments)
        keep = partial(jnp.where, is_finite)

        whole = filled(params, state.params)
        metrics = computed.metrics
        if self.state_params:
            moved, metrics = self.state_params.after_step(whole, metrics, computed.tokens)
            whole = jax.tree.map(keep, moved, whole)
        new = replace(
            state,
            step=state.step + 1,
            params=whole,
            opt_state=jax.tree.map(keep, opt_state, moments),
            skipped=state.skipped + keep(0, 1).astype(jnp.int32),
            carried=jax.tree.map(keep, computed.carried, state.carried),
        )
        of_step = {"loss": computed.loss, "grad_norm": computed.norm, "tokens": computed.tokens, "skipped": new.skipped}
        return new, metrics | of_step | self._rate(state)

    def _updates(
        self, grads: Any, opt_state: Any, params: Any, step: jax.Array, loss: jax.Array, gradients_at: Any
    ) -> tuple[Any, Any]:
        tx = optax.with_extra_args_support(self.tx)
        given = {"value": loss, "grad": grads, "step": step}
        if gradients_at:
            given |= for_line_search(gradients_at)
        parameters = signature(tx.update).parameters
        if all(parameter.kind is not Parameter.VAR_KEYWORD for parameter in parameters.values()):
            given = {name: x for name, x in given.items() if name in parameters}  # SAM's update accepts no others
        try:
            return tx.update(grads, opt_state, params, **given)
        except TypeError as error:
            raise _refused(error, given) from error

    def _rate(self, state: TrainState) -> Metrics:
        if self.learning_rate is None:
            return {}
        with jax.numpy_dtype_promotion("standard"):
            return {"lr": jnp.asarray(self.learning_rate(state.step - state.skipped), jnp.float32)}


def for_line_search(gradients_at: Callable[[Any], Gradients]) -> dict[str, Callable[..., Any]]:
    """Optax's `value_fn` and `grad_fn`: the loss and its gradient at other parameters, on the same batch."""

    def grad_fn(params: Any, *_: Any) -> Any:
        return jax.tree.map(lambda g, p: g.astype(p.dtype), gradients_at(params).grads, params)

    @jax.custom_vjp
    def loss(params: Any) -> jax.Array:
        return gradients_at(params).loss

    def forward(params: Any) -> tuple[jax.Array, Any]:
        computed = gradients_at(params)
        return computed.loss, jax.tree.map(lambda g, p: g.astype(p.dtype), computed.grads, params)

    def backward(grads: Any, cotangent: jax.Array) -> tuple[Any]:
        return (jax.tree.map(lambda g: g * cotangent.astype(g.dtype), grads),)

    loss.defvjp(forward, backward)

    def value_fn(params: Any, *, step: Any = None, grad_fn: Any = None) -> jax.Array:
        return loss(params)  # Optax's line search requires that this function accepts the arguments of an update

    return {"value_fn": value_fn, "grad_fn": grad_fn}


def _refused(error: TypeError, given: Mapping[str, Any]) -> Exception:
    """The error for an optimizer that refuses the arguments of an update, or requires others."""
    if not re.search("keyword|value_fn", str(error)):
        return error
    what = f"this optimizer refuses the arguments of an update, {', '.join(given)}, or requires others: {error}"
    return ConfigError(f"{what}; optax.contrib.sam works only alone, outside of optax.chain")


@dataclass(frozen=True)
class Step:
    """A compiled training step: `state, metrics = step(state, batch)`. The state is donated.

    A call returns before the step ends. It waits for the step `IN_FLIGHT` before it, so a loop need not read a loss.

    States have stacks of layers in the model's order. An interleaved or V-shaped pipeline needs another order, and a
    step without a loop over layers needs an array for each, on CPUs. Such a step converts a state twice.
    `state = step.prepare(state)` converts it once: the steps after it convert nothing, and `step.finish(state)`
    converts it back, for an evaluation or a checkpoint.

    Args:
      program: the compiled function.
      batch: tree of `ShapeDtypeStruct`: the batch that it was compiled for.
      given: further inputs of every call: name -> tree of arrays, or of structs until they exist.
      layers: converts a state to what the program expects; None if that is the model's.
      order: int[seq], the token of a row at each place of its shards; None if rows keep their order. NumPy arrays are
        brought into this order; arrays on devices must come from `Training.put`.
      warnings: XLA's messages from the compilation, which `Prepared.inspect` reports; see `compiling`.
      in_flight: the metrics of the last steps, which may not have ended.
    """

    program: Program
    batch: dict[str, jax.ShapeDtypeStruct]
    given: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    order: np.ndarray | None = None
    layers: StoredLayers | None = None
    in_flight: deque[Metrics] = field(default_factory=deque, init=False, repr=False, compare=False)

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        return self._run(self.program, state, batch)

    def _run(self, program: Program, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        if self.order is not None:
            batch = {name: arranged(x, self.order) if isinstance(x, np.ndarray) else x for name, x in batch.items()}
        layers = self.layers if self.layers and not state.is_prepared else None
        state, metrics = program(layers.to_step(state) if layers else state, batch | self.given)
        self.in_flight.append(metrics)
        if len(self.in_flight) > IN_FLIGHT:
            jax.block_until_ready(self.in_flight.popleft())
        return layers.to_model(state) if layers else state, metrics

    def at(self, index: int) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
        """The function that runs step `index`, counted from 1. Only local updates have several functions."""
        return self

    def read(self, metrics: Metrics) -> dict[str, np.ndarray]:
        """The metrics of a step as NumPy arrays, for the whole batch. It waits for the step; all processes call it."""
        return jax.device_get(metrics)

    def prepare(self, state: TrainState) -> TrainState:
        """The state with its layers as the step needs them. It is donated; see `to_step` of `layers`."""
        return self.layers.to_step(state) if self.layers else state

    def finish(self, state: TrainState) -> TrainState:
        """The state with its layers as in the model. It is donated; see `to_model` of `layers`."""
        return self.layers.to_model(state) if self.layers else state

    @property
    def compiled(self) -> jax.stages.Compiled:
        """The executable."""
        return self.program.compiled

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the program as it is given to XLA, which may compile it differently on each host."""
        lowered = self.program.lowered
        return sha256(lowered.as_text().encode()).hexdigest() if lowered else ""

    @property
    def text(self) -> str:
        """The optimized program as HLO text."""
        return self.compiled.as_text() or ""


def step_function(
    gradients: Callable[..., Gradients], update: Update, placement: StatePlacement
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The step before it is compiled, which can be traced for any machine.

    Args:
      gradients: (params, batch, step, carried) -> `Gradients`, see `train.gradients`.
    """
    sharded = shardings(structs(placement.trained))

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        def at(params: Any) -> Gradients:
            computed = gradients(filled(params, state.params), with_rows(batch), state.step, state.carried)
            return replace(computed, grads=jax.lax.with_sharding_constraint(computed.grads, sharded))

        computed = at(state.params)
        state = replace(state, opt_state=on_device(state.opt_state, placement.opt_state))
        return update(state, computed, sharded, at)

    return step


def compile_step(
    step: Callable[..., Any],
    placement: StatePlacement,
    batch: dict[str, jax.ShapeDtypeStruct],
    given: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    layers: StoredLayers | None = None,
    metrics: NamedSharding | None = None,
) -> Step:
    """Compiles a step from placements alone; no array exists yet.

    Args:
      layers: see `Step`.
      metrics: how metrics are sharded. Default: every device has them whole.
      batch: structs with shardings, see `batch_structs`.
      given: further inputs of every call, trees of structs.
      options: for the compiler.
    """
    state = replace(placement.structs, is_prepared=layers is not None)
    out = (shardings(state), metrics or whole(placement.mesh))
    traced = trace(step, (state, batch | (given or {})), out, donate=(0,))
    with compiling() as warnings:
        program = compile_program(traced, options)
    return Step(program, batch, given or {}, tuple(warnings), layers=layers)
