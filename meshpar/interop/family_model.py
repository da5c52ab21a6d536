"""A decoder of a family of Hugging Face, as a kind of model: it is partitioned as a Flax model of the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import pydantic

from meshpar.errors import CheckpointError, ConfigError, Problems
from meshpar.interop import architectures
from meshpar.interop.family_config import family_of, options_of
from meshpar.interop.flax_model import Import
from meshpar.interop.folder import CONFIG, tensors_of
from meshpar.interop.huggingface import Pretrained, compare
from meshpar.interop.layout import Layout, module_layout, module_of
from meshpar.interop.safetensors import Tensor
from meshpar.models.contract import ModelContract
from meshpar.models.families.family import Family
from meshpar.models.families.options import DecoderOptions

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

    def vocabulary(self) -> int | None:
        return self.vocab_size

    @cached_property
    def layout(self) -> Layout:
        """The tensors of a folder of this model."""
        return module_layout(self.options, self.family)

    def exported(self, kept: dict[str, Any] | None) -> tuple[dict[str, Any], Layout]:
        """The `config.json` and the tensors of a new folder.

        Args:
          kept: the file that the model was read from. If it still describes the model, it is the new one.
        """
        if kept is None:
            return self.config, self.layout
        if options_of(kept, "", Problems()) == self.options:
            return kept, self.layout
        return self.config | {key: value for key, value in kept.items() if key in architectures.IDS}, self.layout


@dataclass(frozen=True)
class FamilyPretrained(Pretrained):
    """A checked folder of a family."""

    model: FamilyModel  # pyright: ignore[reportIncompatibleVariableOverride]

    def check(self, model: ModelContract) -> None:
        """Checks that the folder's model is the model of a run.

        Raises:
          ConfigError: it is another one.
        """
        if self.is_upcycled:
            raise ConfigError("init.upcycle: only meshpar's own decoders are upcycled; init.upcycle=false")
        if not isinstance(model, type(self.model)):
            what = f"describes a model of kind {self.model.kind}, not {model._name}; model=null"
            raise ConfigError(f"init.from_hf: {self.folder / CONFIG} {what}")
        if not self._is_model(model):
            ours, own = model.config, self.config
            keys = sorted(key for key in {*ours, *own} - {*DTYPES} if ours.get(key) != own.get(key))
            what = f"differs from {self.folder / CONFIG}: {', '.join(keys) or 'config'}"
            raise ConfigError(f"model.config {what}; leave model.config out")

    def _is_model(self, model: FamilyModel) -> bool:
        """Whether the folder has the parameters of a run's model."""
        return model.options == self.model.options


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
    assert options is not None
    check_layers(folder, len(options.layers), given)
    model = FamilyModel(config=config)
    layout = model.layout
    tensors = layout.flat(layout.complete(given))
    compare(tensors, layout.expected, model, problems)
    problems.raise_any(CheckpointError, f"{folder} does not hold what its {CONFIG} describes:")
    return FamilyPretrained(folder, config, model, layout, {name: tensors[name] for name in layout.expected})


def check_layers(folder: Path, num: int, given: Mapping[str, Tensor]) -> None:
    """Refuses more layers than tensors, before the tensors of each layer are listed."""
    if num > max(1, len(given)):
        raise CheckpointError(f"{folder / CONFIG} has {num} layers, but there are {len(given)} tensors")
