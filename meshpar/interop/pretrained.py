"""Starts a training from a Hugging Face model, and keeps the files of the model beside its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax

from meshpar.checkpoint.saved import find
from meshpar.data.tokenizer import Bytes, Tokenizer
from meshpar.errors import CheckpointError, ConfigError
from meshpar.interop.folder import MODEL_FILES
from meshpar.interop.huggingface import Pretrained
from meshpar.interop.peft import files_of
from meshpar.interop.peft_params import AdapterParams
from meshpar.nn.dora import norms
from meshpar.nn.lora import MAGNITUDE, NAME, inputs_of, is_lora
from meshpar.nn.quantized_kernel import STORED, QuantizedKernel
from meshpar.train.program import shardings
from meshpar.train.state import TrainState
from meshpar.train.training import Training
from meshpar.tree import flatten_with_paths


@dataclass(frozen=True)
class PretrainedBeginning:
    """The first state of a training, with the parameters of a folder. Others, such as LoRA's, are initialized.

    Args:
      codes: by path, the kernels that the model stores as codes.
      adapter: what LoRA begins with; None for a random first matrix, and a second one of zeros.
    """

    training: Training
    source: Pretrained
    codes: Mapping[str, QuantizedKernel] = field(default_factory=dict)
    adapter: AdapterParams | None = None

    def state(self) -> TrainState:
        """Reads the parameters, each device its own shards, and initializes the rest."""
        structs = flatten_with_paths(self.training.placement.structs.params)
        params: dict[str, jax.Array] = {}
        for path, kernel in self.codes.items():
            params |= self._quantized(path, kernel, structs)
        params |= self.source.params({path: structs[path] for path in self.source.paths if path not in self.codes})
        if self.adapter:
            params |= self._adapted(self.adapter, params, structs)
        return self.training.compile_init(given={f"params.{path}": array for path, array in params.items()})()

    def _adapted(
        self, adapter: AdapterParams, params: Mapping[str, jax.Array], structs: Mapping[str, jax.ShapeDtypeStruct]
    ) -> dict[str, jax.Array]:
        """What LoRA begins with. Of a magnitude that is its change, from the norm of the kernel on the devices."""
        read = {path: adapter.array(path, one) for path, one in structs.items() if is_lora(path)}
        for path in [path for path in read if path.endswith(f".{MAGNITUDE}")]:
            update = path.removesuffix(MAGNITUDE)
            kernel = f"{update.removesuffix(f'{NAME}.')}kernel"
            stored = {name: params[one] for name, one in {"": kernel, **_stored(kernel)}.items() if one in params}
            matrices = (read[f"{update}a"], read[f"{update}b"])

            def change(whole: jax.Array, *given: Any, of: str = kernel) -> jax.Array:
                floats = given[0][""] if "" in given[0] else self.codes[of].of(given[0])
                return (whole - norms(floats, inputs_of(floats, *given[1:]))).astype(whole.dtype)

            read[path] = jax.jit(change, out_shardings=structs[path].sharding)(read[path], stored, *matrices)
        return read

    def _quantized(
        self, path: str, kernel: QuantizedKernel, structs: Mapping[str, jax.ShapeDtypeStruct]
    ) -> dict[str, jax.Array]:
        """What is stored for a kernel of the folder. Memory: the kernel too, sharded like its codes."""
        stored = {name: structs[f"{path}.{name}"] for name in STORED if f"{path}.{name}" in structs}
        dtype = stored["steps" if "steps" in stored else "scales"].dtype
        read = self.source.params({path: jax.ShapeDtypeStruct(kernel.shape, dtype, sharding=stored["codes"].sharding)})
        dim = len(kernel.shape) - kernel.from_end
        of_kernel = partial(kernel.how.quantize, dim=dim, num_inputs=kernel.num_inputs)
        quantize = jax.jit(of_kernel, out_shardings=shardings(stored))
        return {f"{path}.{name}": array for name, array in quantize(read[path]).items()}

    def record(self) -> dict[str, Any]:
        """The entry for the run's records: the source, and which parameters were restored and initialized."""
        paths = list(flatten_with_paths(self.training.specs))
        read = {path for path in paths if path in self.source.paths or path.rpartition(".")[0] in self.codes}
        read |= {path for path in paths if self.adapter and is_lora(path)}
        taken, made = ([f"params.{path}" for path in paths if (path in read) == is_read] for is_read in (True, False))
        return {
            "source": str(self.source.folder),
            "restored": taken,
            "initialized": made,
            "ignored": [*self.source.left_out],
            "changed": {},
        }


def _stored(kernel: str) -> dict[str, str]:
    """The paths of what is stored for a kernel in codes, by name."""
    return {name: f"{kernel}.{name}" for name in STORED}


def model_files(from_hf: Path | None, from_checkpoint: Path | None, run_dir: Path) -> Path | None:
    """The folder with the config, the tokenizer and the templates of a run's model: its own, or that of its `init`."""
    folders = [run_dir / MODEL_FILES]
    if from_hf:
        folders.append(files_of(from_hf) if from_hf.is_dir() else from_hf)
    elif from_checkpoint:
        with suppress(CheckpointError):  # a run that resumes does not need its source any more
            folders.append(find(from_checkpoint, include=()).folder.parents[1] / MODEL_FILES)
    return next((folder for folder in folders if folder.is_dir()), None)


def check_ids(folder: Path, tokenizer: Tokenizer) -> None:
    """Checks that data are not encoded as bytes if the model in the folder has a tokenizer.

    Raises:
      ConfigError: they are: the ids of bytes are other ids than those of the model.
    """
    if isinstance(tokenizer, Bytes) and (folder / "tokenizer.json").is_file():
        what = f"bytes are not the ids of the model, whose tokenizer is in {folder}"
        raise ConfigError(f"data.tokenizer: {what}; data.tokenizer={folder / 'tokenizer.json'}")
