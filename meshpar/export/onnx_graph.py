"""Writes a trained model as an ONNX graph.

A decoder of meshpar goes through its Hugging Face folder, transformers and PyTorch's exporter; a user's own model is
converted from JAX. Why there are two ways: docs/design/serving-compression-export.md.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from meshpar.convert import run_at, to_hf
from meshpar.errors import CheckpointError, ConfigError, Problems, excerpt
from meshpar.export.forward import Exportable, first_of, open_run
from meshpar.export.stablehlo_program import names, with_open_sizes
from meshpar.interop.export import check_free, whole_or_not
from meshpar.interop.flax_model import Import

OF_DECODERS = ("torch", "transformers", "onnx", "onnxscript")
OF_OTHERS = ("jax2onnx", "dm_pix", "equinox", "onnx", "onnxruntime")
"""The packages that are needed: of `meshpar[onnx]`, and jax2onnx, whose own requirements exclude our Orbax."""
ALONE = "pip install 'meshpar[onnx]' && pip install --no-deps jax2onnx==0.17.1"


def onnx(source: Path | str, folder: Path | str) -> None:
    """Exports the last checkpoint of a run as `model.onnx`, of any batch size and length of rows, in float32.

    The graph of a decoder has the input `tokens`, int64[batch, seq], and the output `logits`, float32[batch, seq,
    vocab_size]. The inputs of a user's own model are the arrays that it is called with, in their own dtypes; if its
    trace needs the length of a row, the graph has that of the run's data.

    Args:
      source: a run directory, or the config of a run.
      folder: created, complete or not at all. Large parameters are in a file beside the graph.

    Raises:
      ConfigError: lists every package that is not installed; or an operation of the model has no ONNX operators.
      CheckpointError: the folder exists, there is no checkpoint, or the model has no architecture in Hugging Face's
        libraries.
    """
    source, folder = Path(source), Path(folder)
    check_free(folder)
    if isinstance(run_at(source).model, Import):
        _of_own(source, folder)
    else:
        _of_decoder(source, folder)


def _check_installed(packages: tuple[str, ...], how: str) -> None:
    problems = Problems()
    for package in packages:
        if not find_spec(package):
            problems.add(package, "is not installed", how)
    problems.raise_any(ConfigError, "the model cannot be exported to ONNX:")


def _of_own(source: Path, folder: Path) -> None:
    _check_installed(OF_OTHERS, ALONE)
    made = open_run(source, "float32")
    with whole_or_not(folder) as there:
        convert(made, there / "model.onnx")


def _of_decoder(source: Path, folder: Path) -> None:
    _check_installed(OF_DECODERS, "pip install 'meshpar[onnx]'")
    with TemporaryDirectory() as temporary:
        there = Path(temporary) / "model"
        try:
            to_hf(source, there)
        except CheckpointError as error:
            raise CheckpointError(f"ONNX graphs are made from Hugging Face folders: {error}") from None
        with whole_or_not(folder) as made:
            _write(there, made / "model.onnx")


def _write(hugging_face: Path, path: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch and transformers warn about their own code
        import torch
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(
            hugging_face, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )

        class Logits(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model.eval()

            def forward(self, tokens: Any) -> Any:
                return self.model(input_ids=tokens, use_cache=False).logits

        dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq")}
        torch.onnx.export(
            Logits(), (torch.zeros((2, 3), dtype=torch.int64),), path, dynamo=True, verbose=False,
            input_names=["tokens"], output_names=["logits"], dynamic_shapes={"tokens": dims},
        )  # fmt: skip


def convert(made: Exportable, path: Path) -> None:
    """Writes a graph of open sizes with its parameters; its inputs and results are named as in `signature.json`."""

    def refused(error: Exception) -> ConfigError:
        path.unlink(missing_ok=True)
        what = f"jax2onnx does not convert it: {type(error).__name__}: {excerpt(str(error))}"
        return ConfigError(f"the model cannot be exported to ONNX: {what}; export --format stablehlo")

    ways = [(dims, traced) for dims in made.dims for traced in (_unchanged, _traced)]
    first_of([partial(_write_own, made, dims, path, traced) for dims, traced in ways], refused)


def _unchanged(forward: Callable[..., Any], inputs: Any) -> Callable[..., Any]:
    """jax2onnx replaces functions of JAX and Flax while it traces, by some that have an operator of ONNX."""
    return forward


def _traced(forward: Callable[..., Any], inputs: Any) -> Callable[..., Any]:
    """Traced before. Some code cannot be traced with functions replaced, such as `nn.scan`'s."""
    return jaxpr_as_fun(jax.make_jaxpr(forward)(*inputs))


def _write_own(made: Exportable, dims: str, path: Path, traced: Callable[..., Any]) -> None:
    import onnxruntime
    from jax2onnx import to_onnx

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
