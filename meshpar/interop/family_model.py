"""A decoder of a family of Hugging Face, as a kind of model: it is partitioned as a Flax model of the user's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import numpy as np
import pydantic

from meshpar.errors import CheckpointError, ConfigError, Problems
from meshpar.interop import architectures
from meshpar.interop.export import LARGEST_FILE, copy_companions, whole_or_not, write_files
from meshpar.interop.family_config import family_of, options_of
from meshpar.interop.family_tensors import expected, module_of, places_of, shapes_in, shapes_of, split, written
from meshpar.interop.flax_model import Import
from meshpar.interop.folder import read_json
from meshpar.interop.huggingface import CONFIG, Pretrained, TensorPart, compare, tensors_of, with_prefix
from meshpar.interop.safetensors import Tensor
from meshpar.models.contract import ModelContract, Unsupported, Vocabulary
from meshpar.models.families.family import Family
from meshpar.models.families.options import DecoderOptions
from meshpar.models.foreign import EXPERT

VALUE = ".value"
"""The end of the path of a variable of NNX."""
DTYPES = ("dtype", "torch_dtype", "transformers_version", "architectures")
"""Keys of a config in which two files of one model may differ."""


class FamilyModel(Import):
    """A decoder of one of Hugging Face's families.

    >>> sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    >>> FamilyModel(config={"model_type": "gemma", "vocab_size": 64, "head_dim": 8, **sizes}).vocab_size
    64
    """

    kind: Literal["family"] = "family"  # pyright: ignore[reportIncompatibleVariableOverride]
    config: dict[str, Any]
    """The keys of the model's `config.json`, with its `model_type`. A missing key has the default of its class."""

    target: ClassVar[str] = "model.config"
    arguments: ClassVar[dict[str, Any]] = {}
    dims: ClassVar[dict[str, tuple[str, ...]]] = {}
    activation_dims: ClassVar[tuple[str, ...]] = ()
    axes: ClassVar[dict[str, str]] = {}
    inputs: ClassVar[dict[str, str]] = {}
    manual: ClassVar[bool] = False
    called_with: ClassVar = ("tokens", "segments", "positions")

    @pydantic.model_validator(mode="after")
    def _is_supported(self) -> FamilyModel:
        problems = Problems()
        options_of(self.config, "config", problems)
        raise_as_values(problems)
        return self

    @cached_property
    def options(self) -> DecoderOptions:
        options = options_of(self.config, "config", Problems())
        assert options is not None  # it was validated
        return options

    @property
    def family(self) -> Family:
        family = family_of(self.config)
        assert family is not None
        return family

    def module(self) -> Any:
        return module_of(self.options)

    @property
    def vocab_size(self) -> int:
        return self.options.vocab_size

    @property
    def max_seq_len(self) -> int:
        return self.options.max_seq_len

    @property
    def tie_embeddings(self) -> bool:
        return self.options.is_tied

    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.vocab_size, self.vocab_size)

    def hugging_face(self) -> Unsupported:
        return Unsupported("a model of kind family, which has a config.json of its own")


@dataclass(frozen=True)
class FamilyPretrained(Pretrained):
    """A checked folder of a family."""

    model: FamilyModel  # pyright: ignore[reportIncompatibleVariableOverride]

    def check(self, model: ModelContract) -> None:
        """Checks that the folder's model is the model of a run.

        Raises:
          ConfigError: it is another one.
        """
        self.check_kind(model)
        assert isinstance(model, FamilyModel)
        if not self._is_model(model):
            ours, own = model.config, self.config
            keys = sorted(key for key in {*ours, *own} - {*DTYPES} if ours.get(key) != own.get(key))
            what = f"differs from {self.folder / CONFIG}: {', '.join(keys) or 'config'}"
            raise ConfigError(f"model.config {what}; leave model.config out")

    def _is_model(self, model: FamilyModel) -> bool:
        """Whether the folder has the parameters of a run's model."""
        return model.options == self.model.options

    def check_kind(self, model: ModelContract) -> None:
        """Checks that a run's model is of the folder's kind, and begins with it as it is.

        Raises:
          ConfigError: it is another one, or would be upcycled.
        """
        if self.is_upcycled:
            raise ConfigError("init.upcycle: only meshpar's own decoders are upcycled; init.upcycle=false")
        if not isinstance(model, type(self.model)):
            what = f"describes a model of kind {self.model.kind}, not {model._name}; model=null"
            raise ConfigError(f"init.from_hf: {self.folder / CONFIG} {what}")

    @property
    def prefix(self) -> str:
        return f"{next(iter(self.model.family.names_of(self.model.options))).partition('.')[0]}."

    @property
    def transposed(self) -> set[str]:
        return {
            name
            for place in places_of(self.model.options, self.model.family)
            if place.foreign.inputs and not place.foreign.outputs_first
            for _, name in place.numbered()
        }

    @cached_property
    def _parts(self) -> dict[str, TensorPart]:
        shapes = shapes_of(self.model.options)
        found: dict[str, TensorPart] = {}
        for place in places_of(self.model.options, self.model.family):
            begin = 0
            inner = shapes_in(place, shapes)
            for path in place.foreign.parts:
                found[path + VALUE] = TensorPart(place.name, place.foreign, inner[path], begin)
                begin += int(np.prod(inner[path][place.foreign.inputs :]))
        return found

    def _shard(self, part: TensorPart, index: list[slice], dtype: np.dtype) -> np.ndarray:
        if EXPERT not in part.name:
            return self._block(part, part.name, index).astype(dtype)
        names = [part.name.replace(EXPERT, str(i)) for i in range(index[0].start, index[0].stop)]
        return np.stack([self._block(part, name, index[1:]) for name in names]).astype(dtype)


def raise_as_values(problems: Problems) -> None:
    """Raises them as pydantic takes them, which adds where the model is."""
    if problems.found:
        raise ValueError(
            "\n".join("; ".join(filter(None, (f"{one.where}: {one.what}", one.fix))) for one in problems.found)
        )


def open_family(folder: Path, config: dict[str, Any]) -> FamilyPretrained:
    """Reads the headers of a folder, whose config is of a family.

    Raises:
      CheckpointError: lists every problem, see `open_pretrained`.
    """
    problems = Problems()
    options = options_of(config, str(folder / CONFIG), problems)
    given = tensors_of(folder, problems)
    problems.raise_any(CheckpointError, f"{folder} cannot be imported:")
    family = family_of(config)
    assert options is not None and family is not None
    check_layers(folder, len(options.layers), given)
    places = places_of(options, family)
    tensors = split(with_prefix(given, [*family.names_of(options)]), places)
    model = FamilyModel(config=config)
    wanted = expected(options, places)
    compare(folder, tensors, wanted, model, problems)  # pyright: ignore[reportArgumentType]
    problems.raise_any(CheckpointError, f"{folder} does not hold what its {CONFIG} describes:")
    return FamilyPretrained(folder, config, model, {name: tensors[name] for name in wanted})


def check_layers(folder: Path, num: int, given: Mapping[str, Tensor]) -> None:
    """Refuses more layers than tensors, before the tensors of each layer are listed."""
    if num > max(1, len(given)):
        raise CheckpointError(f"{folder / CONFIG} has {num} layers, but there are {len(given)} tensors")


def export_family(
    folder: Path, model: FamilyModel, params: Mapping[str, jax.Array], companions: Path | None,
    largest_file: int = LARGEST_FILE,
) -> None:  # fmt: skip
    """Writes a model of a family as a folder, see `export.export`.

    Args:
      companions: a folder with the `config.json` that the model was read from, and its tokenizer's files.
    """
    write_model(folder, model, _config(model, kept_config(companions)), params, companions, largest_file)


def write_model(
    folder: Path, model: FamilyModel, config: Mapping[str, Any], params: Mapping[str, jax.Array],
    companions: Path | None, largest_file: int, without: str = "",
) -> None:  # fmt: skip
    """Writes a config and the tensors of a model, see `export_family`.

    Args:
      without: a beginning that the tensors' names lose.
    """
    params = {path.removesuffix(VALUE): array for path, array in params.items()}
    dtype = np.dtype(next(iter(params.values())).dtype)
    config = {**config, "dtype" if "dtype" in config else "torch_dtype": dtype.name}
    tensors = written(model.options, model.family, params, dtype)
    named = [replace(one, name=one.name.removeprefix(without)) for one in tensors]
    with whole_or_not(folder) as made:
        (made / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        copy_companions(companions, made)
        write_files(made, named, largest_file)


def kept_config(companions: Path | None) -> dict[str, Any] | None:
    """The `config.json` that a model was read from; None if it was not kept.

    Raises:
      CheckpointError: it cannot be read.
    """
    if companions is None or not (companions / CONFIG).exists():
        return None
    problems = Problems()
    kept = read_json(companions, CONFIG, problems)
    problems.raise_any(CheckpointError, f"{companions} cannot be read:")
    return kept


def _config(model: FamilyModel, kept: dict[str, Any] | None) -> dict[str, Any]:
    """The file that the model was read from if it still describes it, with all of its keys; or else the model's."""
    if kept is None:
        return model.config
    if options_of(kept, "", Problems()) == model.options:
        return kept
    return model.config | {key: value for key, value in kept.items() if key in architectures.IDS}
