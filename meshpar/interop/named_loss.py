"""Calls a user's model with the arrays of a batch, for a loss by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any, TypeVar

import flax.linen as nn
import jax
from flax import nnx

from meshpar.data.rows.spec import COUNTED
from meshpar.errors import ConfigError, Problems, suggestion
from meshpar.interop.modes import IF_TRAINING
from meshpar.train.loss import Batch, LossSums
from meshpar.train.tasks import NamedLoss

Spec = TypeVar("Spec")


@dataclass(frozen=True)
class ModelCall:
    """How a loss by name calls a model.

    Args:
      target: names the model in errors.
      parameters: of the call that need an array.
      optional: of the call that may get one.
      flags: those of `IF_TRAINING` that the call has.
      given: parameter -> array, from the config.
      is_linen: whether the call takes the random keys of Linen.
      takes_keys: whether the call of an NNX module has a parameter `rngs`, which is None in an evaluation.
    """

    target: str
    parameters: tuple[str, ...]
    optional: tuple[str, ...]
    flags: tuple[str, ...]
    given: Mapping[str, str]
    is_linen: bool
    takes_keys: bool = False

    @classmethod
    def of(cls, module: Any, target: str, given: Mapping[str, str]) -> ModelCall:
        """How a Linen module is called, or the NNX module that a function with an argument `rngs` returns."""
        with nnx.use_eager_sharding(False):
            made = module if isinstance(module, nn.Module) else nnx.eval_shape(lambda: module(rngs=nnx.Rngs(0)))
        parameters = signature(type(made).__call__).parameters
        kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        named = {name: one for name, one in parameters.items() if name != "self" and one.kind in kinds}
        is_linen = isinstance(made, nn.Module)
        takes_keys = "rngs" in named and not is_linen
        arrays = {name: one for name, one in named.items() if name not in IF_TRAINING and name != "rngs"}
        required = tuple(name for name, one in arrays.items() if one.default is Parameter.empty)
        optional = tuple(name for name in arrays if name not in required)
        flags = tuple(name for name in named if name in IF_TRAINING)
        return cls(target, required, optional, flags, given, is_linen, takes_keys)

    def trained(self, loss: NamedLoss) -> Callable[[Any, Batch, Any], LossSums]:
        """The loss of a step: (model, batch, key)."""

        def trained(model: Any, batch: Batch, key: Any) -> LossSums:
            inputs, more = loss.inputs(batch, key)
            return loss.sums(self.outputs(model, inputs, loss.labels, key), batch, more, is_training=True)

        return trained

    def evaluated(self, loss: NamedLoss) -> Callable[[Any, Batch, Any], tuple[LossSums, dict[str, jax.Array], Any]]:
        """(model, batch, key) -> the loss of an evaluation, what the metrics of all rows need, and the outputs."""

        def evaluated(model: Any, batch: Batch, key: Any) -> tuple[LossSums, dict[str, jax.Array], Any]:
            inputs, more = loss.inputs(batch, None)
            outputs = self.outputs(model, inputs, loss.labels)
            sums = loss.sums(outputs, batch, more, is_training=False)
            return sums, loss.of_rows(outputs, batch) | {COUNTED: batch[COUNTED]}, outputs

        return evaluated

    def outputs(
        self, model: Any, inputs: Mapping[str, Any], labels: Sequence[str], key: jax.Array | None = None
    ) -> Any:
        """What the model returns.

        Args:
          labels: arrays of the rows that are not among the inputs, for messages.
          key: of the dropout of a step; None in an evaluation.
        """
        is_training = key is not None
        flags = {name: IF_TRAINING[name] == is_training for name in self.flags}
        names = self._names(inputs, labels)
        rngs: dict[str, Any] = {"rngs": {"dropout": key}} if self.is_linen and is_training else {}
        if self.takes_keys:
            rngs = {"rngs": None if key is None else nnx.Rngs(key)}
        return model(**{parameter: inputs[name] for parameter, name in names.items()}, **flags, **rngs)

    def inputs(self, arrays: Mapping[str, Spec], labels: Sequence[str]) -> dict[str, Spec]:
        """Those arrays of a batch, or specs of them, that the model is called with; see `outputs`."""
        possible = {name: x for name, x in arrays.items() if name not in (*labels, COUNTED, "rows")}
        return {name: possible[name] for name in sorted({*self._names(possible, labels).values()})}

    def _names(self, inputs: Mapping[str, Any], labels: Sequence[str]) -> dict[str, str]:
        """Parameter -> the array that it gets.

        Raises:
          ConfigError: lists every parameter without an array, and every name in `model.inputs` that is not there.
        """
        problems = Problems()
        parameters = (*self.parameters, *self.optional)
        there = ", ".join(inputs)
        besides = f" besides {', '.join(labels)}" if labels else ""
        for parameter, name in self.given.items():
            if parameter not in parameters:
                fix = suggestion(parameter, parameters, f"it has {', '.join(parameters)}")
                problems.add(f"model.inputs.{parameter}", f"the call of {self.target} has no such parameter", fix)
            elif name not in inputs:
                fix = suggestion(name, inputs, f"the rows have {there}{besides}")
                problems.add(f"model.inputs.{parameter} = {name}", "the model can be called with no such array", fix)
        found = {parameter: name for parameter, name in self.given.items() if name in inputs}
        left = [parameter for parameter in self.parameters if parameter not in self.given]
        if len(self.parameters) == 1 and left and len(inputs) == 1:
            return found | {left[0]: next(iter(inputs))}
        for parameter in left:
            if parameter in inputs:
                found[parameter] = parameter
            else:
                what = f"the call of {self.target} needs it, and the rows have {there}{besides}"
                fix = f"model.inputs={{{parameter}: {next(iter(inputs), 'ARRAY')}}}"
                problems.add(f"model.inputs.{parameter}", what, fix)
        found |= {name: name for name in self.optional if name in inputs and name not in self.given}
        problems.raise_any(ConfigError, "the model cannot be called with the arrays of a batch:")
        return found
