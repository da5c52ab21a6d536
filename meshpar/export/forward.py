"""The exported functions: a decoder's forward, from parameters by path and tokens to logits, and that of any model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.convert import carried_of, trained
from meshpar.errors import ConfigError, MeshparError
from meshpar.experiment.config import Run
from meshpar.experiment.validate import task_of
from meshpar.interop.flax_model import Import
from meshpar.interop.forward import forward_of as own_forward
from meshpar.models.decoder import DecoderModel
from meshpar.nn.attention.reference import Reference
from meshpar.nn.describe import describe, functional
from meshpar.nn.remat import Remat
from meshpar.parallel.precision import computed_in, wide
from meshpar.tree import map_with_path

CARRIED = "carried."
"""Begins the names of arrays that are no parameters, such as batch statistics."""
Forward = Callable[[Mapping[str, Any], jax.Array], jax.Array]
"""(parameters by path, int32[batch, seq] tokens) -> float32[batch, seq, vocab_size] logits. A row is one document."""


@dataclass(frozen=True)
class Exportable:
    """A function whose program can be written.

    Args:
      apply: (arrays by path, inputs) -> its results.
      arrays: the parameters, and what else the forward reads, by path; or structs of them.
      inputs: tree of structs of one row.
      dims: names of the first dims of every input, whose sizes the program leaves open. Where it cannot be traced so,
        the next ones are tried.
      limits: what is known of these sizes, such as `seq <= 64`.
      of_input, of_output: the names of a single input and of a single result.
    """

    apply: Callable[[Mapping[str, Any], Any], Any]
    arrays: Mapping[str, Any]
    inputs: Any
    dims: Sequence[str] = ("batch",)
    limits: Sequence[str] = ()
    of_input: str = "input"
    of_output: str = "output"


def first_of(attempts: Sequence[Callable[[], Any]], refused: Callable[[Exception], ConfigError]) -> Any:
    """What the first attempt returns that succeeds: the user's code, or a converter, may need sizes that are open.

    Args:
      refused: the exception of the last attempt -> what is raised then.
    """
    *others, last = attempts
    for attempt in others:
        with suppress(Exception):  # they say it in many ways
            return attempt()
    try:
        return last()
    except MeshparError:
        raise
    except Exception as error:
        raise refused(error) from error


def open_run(source: Path, compute: str | None = None) -> Exportable:
    """What the last checkpoint of a run computes.

    Args:
      source: a run directory, or the config of a run.
      compute: the dtype to compute in, instead of the run's `precision.compute`.

    Raises:
      CheckpointError: there is no checkpoint.
      ConfigError: the model is written for local shards; or a loss of its own calls it with other arrays.
    """
    run, params, saved = trained(source)
    compute = compute or run.precision.compute
    if isinstance(run.model, DecoderModel):
        return of_decoder(run.model, compute, params)
    return _of_own(run.model, run, compute, params, carried_of(run, saved))


def _of_own(
    model: Import, run: Run, compute: str, params: Mapping[str, jax.Array], carried: Mapping[str, jax.Array]
) -> Exportable:
    """A user's own model in the mode of an evaluation, with the state that its forward changes in training."""
    own = own_forward(model, task_of(run))

    def apply(arrays: Mapping[str, Any], inputs: Any) -> Any:
        def read(path: str, _: Any) -> jax.Array:
            return computed_in(jnp.asarray(arrays[path]), compute)

        kept = map_with_path(lambda path, _: jnp.asarray(arrays[f"{CARRIED}{path}"]), own.carried)
        return own.apply(map_with_path(read, own.params), kept, inputs)

    every = dict(params) | {f"{CARRIED}{path}": x for path, x in carried.items()}
    structs = {name: spec.struct for name, spec in own.inputs.items()}
    return Exportable(apply, every, structs, ("batch, seq", "batch") if run.data.array_specs() is None else ("batch",))


def of_decoder(model: DecoderModel, compute: str, params: Mapping[str, Any]) -> Exportable:
    """One of meshpar's own decoders: (parameters by path, int32[batch, seq] tokens) -> logits."""
    limits = (f"seq <= {model.max_seq_len}",) if model.learned_positions else ()
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return Exportable(forward_of(model, compute), params, tokens, ("batch, seq",), limits, "tokens", "logits")


def forward_of(model: DecoderModel, compute: str) -> Forward:
    """The forward in the dtype `compute`, which every platform computes on one device.

    The reference core replaces attention kernels that only some platforms have; it holds all scores in memory. Experts
    compute every choice of every token, also where `dispatch: capacity` dropped choices in training.
    """
    portable: dict[str, Any] = {"attention": Reference(), "remat": Remat(policy="none"), "unroll": 1, "dropout": 0.0}
    if model.experts:
        portable["experts"] = model.experts.without_training()
    portable_model = model.model_copy(update=portable)
    abstract = portable_model.abstract()
    specs = describe(abstract)
    apply = functional(abstract)

    def forward(params: Mapping[str, Any], tokens: jax.Array) -> jax.Array:
        nested = map_with_path(lambda path, _: computed_in(jnp.asarray(params[path]), compute), specs)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        batch = {"tokens": tokens, "positions": positions, "segments": jnp.zeros_like(tokens), "rows": rows}
        return wide(apply(nested, batch)[..., : model.vocab_size])

    return forward
