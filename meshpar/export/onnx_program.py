"""Writes the forward of a user's own model as an ONNX graph, converted from JAX by `jax2onnx`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
import onnxruntime
from jax.extend.core import jaxpr_as_fun
from jax2onnx import to_onnx

from meshpar.errors import ConfigError, MeshparError, excerpt
from meshpar.export.forward import Exportable
from meshpar.export.stablehlo_program import names, with_open_sizes


def write(made: Exportable, path: Path) -> None:
    """Writes a graph of open sizes, with the parameters in it; large ones are in a file beside it.

    Its inputs and results are named as those of `signature.json`.

    Raises:
      ConfigError: it cannot be traced with open sizes, an operation has no ONNX operators, or ONNX Runtime cannot load
        the graph.
    """
    *others, last = [
        partial(_write, made, dims, path, traced) for dims in made.dims for traced in (_unchanged, _traced)
    ]
    for attempt in others:
        with suppress(Exception):  # the user's code, or the converter, needs sizes, which they say in many ways
            return attempt()
    try:
        return last()
    except MeshparError:
        raise
    except Exception as error:
        path.unlink(missing_ok=True)
        what = f"jax2onnx does not convert it: {type(error).__name__}: {excerpt(str(error))}"
        raise ConfigError(f"the model cannot be exported to ONNX: {what}; export --format stablehlo") from error


def _unchanged(forward: Callable[..., Any], inputs: Any) -> Callable[..., Any]:
    """jax2onnx replaces functions of JAX and Flax while it traces, by some that have an operator of ONNX."""
    return forward


def _traced(forward: Callable[..., Any], inputs: Any) -> Callable[..., Any]:
    """Traced before. Some code cannot be traced with functions replaced, such as `nn.scan`'s."""
    return jaxpr_as_fun(jax.make_jaxpr(forward)(*inputs))


def _write(made: Exportable, dims: str, path: Path, traced: Callable[..., Any]) -> None:
    inputs = with_open_sizes(made, dims)
    leaves, tree = jax.tree.flatten(inputs)

    def forward(*leaves: jax.Array) -> list[jax.Array]:
        return jax.tree.leaves(made.apply(made.arrays, jax.tree.unflatten(tree, leaves)))

    results = jax.eval_shape(lambda inputs: made.apply(made.arrays, inputs), inputs)
    to_onnx(
        traced(forward, leaves), leaves, return_mode="file", output_path=path,
        input_names=names(inputs, made.of_input), output_names=names(results, made.of_output),
    )  # fmt: skip
    onnxruntime.InferenceSession(path)  # jax2onnx writes graphs of complex numbers that no runtime loads
