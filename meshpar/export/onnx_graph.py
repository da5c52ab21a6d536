"""Writes a trained model as an ONNX graph: through its Hugging Face folder, transformers and PyTorch's exporter.

Why not from JAX: docs/design/0017.
"""

from __future__ import annotations

import os
import warnings
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from meshpar.convert import to_hf
from meshpar.errors import CheckpointError, ConfigError, Problems
from meshpar.interop.export import check_free, whole_or_not

NEEDED = ("torch", "transformers", "onnx", "onnxscript")


def onnx(source: Path | str, folder: Path | str) -> None:
    """Exports the last checkpoint of a run as `model.onnx`, of any batch size and length of rows, in float32.

    The graph has the input `tokens`, int64[batch, seq], and the output `logits`, float32[batch, seq, vocab_size].

    Args:
      source: a run directory, or the config of a run.
      folder: created, complete or not at all. Large parameters are in a file beside the graph.

    Raises:
      ConfigError: lists every package that is not installed.
      CheckpointError: the folder exists, there is no checkpoint, or the model has no architecture in Hugging Face's
        libraries.
    """
    problems = Problems()
    for package in NEEDED:
        if not find_spec(package):
            problems.add(package, "is not installed", "pip install 'meshpar[onnx]'")
    problems.raise_any(ConfigError, "the model cannot be exported to ONNX:")
    folder = Path(folder)
    check_free(folder)
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
