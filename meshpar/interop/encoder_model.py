"""An encoder of a family of Hugging Face, as a kind of model: it is trained on rows of arrays with a loss by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pydantic
from pydantic import Field

from meshpar.data.rows.spec import COUNTED
from meshpar.errors import CheckpointError, ConfigError, Problems
from meshpar.interop.encoder_config import (
    MOST_CLASSES,
    Described,
    check_head,
    described,
    encoder_family,
    encoder_options,
)
from meshpar.interop.family_model import FamilyModel, FamilyPretrained, check_layers, raise_as_values
from meshpar.interop.folder import CONFIG, tensors_of
from meshpar.interop.huggingface import compare_one
from meshpar.interop.layout import Layout
from meshpar.interop.safetensors import Tensor
from meshpar.models.contract import ModelContract, Task
from meshpar.models.encoders.family import EncoderFamily, HeadName, Options, Wanted
from meshpar.models.encoders.options import Picture, Text, TwoTowers
from meshpar.models.foreign import Shape
from meshpar.parallel.context import ParallelContext
from meshpar.sharding.spec import ArraySpec

HeadKey = Literal["masked_tokens", "classify", "pairs"]
LOSSES: Mapping[HeadName, tuple[str, ...]] = {
    "masked_tokens": ("masked_tokens",), "classify": ("classify", "regress"), "pairs": ("contrastive",),
}  # fmt: skip
"""Head -> the losses by name that read what it returns."""
OLD_NAMES = ((".LayerNorm.gamma", ".LayerNorm.weight"), (".LayerNorm.beta", ".LayerNorm.bias"))
"""Ends of names that the first versions of transformers wrote -> those of today."""
TIED = re.compile(r"(cls\.predictions\.decoder|lm_head\.decoder|decoder)\.weight")
BUFFER = re.compile(r"(.*\.)?position_ids")


class EncoderModel(FamilyModel):
    """An encoder of one of Hugging Face's families: BERT, RoBERTa, ModernBERT, ViT or CLIP.

    >>> sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    >>> EncoderModel(config={"model_type": "bert", "vocab_size": 64, **sizes}, head="classify").options.head.num
    2
    """

    kind: Literal["encoder"] = "encoder"  # pyright: ignore[reportIncompatibleVariableOverride]
    head: HeadKey | None = None
    """`masked_tokens`: logits of tokens; `classify`: of classes; `pairs`: vectors of two texts. Default: `classify`
    with `num_labels`, else that of `architectures`."""
    num_labels: int | None = Field(default=None, gt=0, le=MOST_CLASSES)
    """Classes of the head `classify`. Default: that of `config`, or 2."""
    pooling: Literal["cls", "mean", "max"] | None = None
    """The vector of a text, for `pairs`: of its first token, or the mean or largest of its tokens. Default: `mean`; in
    `serve` what the folder declares."""

    called_with: ClassVar = ("tokens", "mask", "types")

    @pydantic.model_validator(mode="after")
    def _is_supported(self) -> EncoderModel:
        problems = Problems()
        if (family := encoder_family(self.config)) is None:
            problems.add("config.model_type", f"{self.config.get('model_type')!r} is no encoder that is read")
        elif self._named and not {self._named, *(("hidden",) if self.head == "pairs" else ())} & family.classes.keys():
            known = ", ".join(one for one in family.classes if one != "hidden")
            problems.add("head", f"{self.config['model_type']} has no head {self._named}", f"one of {known}")
        elif self.head == "pairs" and self.config["model_type"] == "vit":
            problems.add("head", "pairs are of texts, and vit reads pictures", "head: classify")
        else:
            if self._named is None:
                check_head(self.config, family, "config", problems)
            encoder_options(self.config, self.wanted, "config", problems)
        for key, given, head in (("num_labels", self.num_labels, "classify"), ("pooling", self.pooling, "pairs")):
            if family and given is not None and self.wanted.head not in (head, "hidden"):
                problems.add(key, f"is of the head {head}, and this model has {self.wanted.head}", f"head: {head}")
        raise_as_values(problems)
        return self

    @property
    def _named(self) -> HeadKey | None:
        """The head that the model's keys ask for."""
        return self.head or ("classify" if self.num_labels else None)

    @property
    def wanted(self) -> Wanted:
        """The head, and what it needs."""
        own = described(self.config, self.family)
        return Wanted(self._named or own.head, self.num_labels or own.num, self.pooling or "mean")

    @cached_property
    def options(self) -> Options:  # pyright: ignore[reportIncompatibleVariableOverride]
        options = encoder_options(self.config, self.wanted, "config", Problems())
        assert options is not None  # it was validated
        return options

    @property
    def family(self) -> EncoderFamily:  # pyright: ignore[reportIncompatibleMethodOverride]
        family = encoder_family(self.config)
        assert family is not None
        return family

    @property
    def text(self) -> Text | None:
        """The tower over tokens; None if there is none."""
        options = self.options
        tower = options.text if isinstance(options, TwoTowers) else options.tower
        return tower if isinstance(tower, Text) else None

    @property
    def picture(self) -> Picture | None:
        """The tower over pictures; None if there is none."""
        options = self.options
        tower = options.picture if isinstance(options, TwoTowers) else options.tower
        return tower if isinstance(tower, Picture) else None

    @property
    def vocab_size(self) -> int:
        return self.text.vocab_size if self.text else 1

    @property
    def max_seq_len(self) -> int:
        return self.text.max_seq_len if self.text else 1

    @property
    def tie_embeddings(self) -> bool:
        return True

    def vocabulary(self) -> int | None:
        return self.text.vocab_size if self.text else None

    def batch_specs(self, batch_size: int, seq_len: int) -> dict[str, ArraySpec]:
        """The arrays of rows that the head reads, with a label for each."""
        specs = {COUNTED: ArraySpec((batch_size,), np.dtype("int32"), ("batch",))}
        if self.text:
            rows = ArraySpec((batch_size, seq_len), np.dtype("int32"), ("batch", ""))
            specs |= {"tokens": rows} | ({"others": rows} if self.head == "pairs" and not self.picture else {})
        if self.picture:
            shape = (batch_size, *self.picture.size, self.picture.channels)
            specs["image"] = ArraySpec(shape, np.dtype("float32"), ("batch", "", "", ""))
        if self.wanted.head == "classify":
            specs["label"] = ArraySpec((batch_size,), np.dtype("int32"), ("batch",))
        return specs

    def check(self, task: Task, ctx: ParallelContext, problems: Problems) -> None:
        super().check(task, ctx, problems)
        head = self.wanted.head
        losses = LOSSES.get(head)
        if losses is None:
            heads = [one for one in LOSSES if one in self.family.classes or (one == "pairs" and self.text)]
            what = f"{self.family.classes['hidden']} returns hidden states, of which no loss is known"
            problems.add("model.head", what, f"model.head={' or '.join(heads)}")
        elif task.named and task.named.kind not in losses:  # pyright: ignore[reportAttributeAccessIssue]
            what = f"the head {head} returns what {' and '.join(losses)} read"
            problems.add(f"loss.kind = {task.named.kind}", what, f"loss.kind={losses[0]}")  # pyright: ignore
        elif not task.named and task.loss.target is None:
            what = "an encoder reads whole rows, and predicts no next token"
            problems.add("loss.kind = next_token", what, f"loss.kind={losses[0]}")

    def exported(self, kept: dict[str, Any] | None) -> tuple[dict[str, Any], Layout]:
        """See `FamilyModel`. The file names the class and the classes of this model's head."""
        config, wanted = self.config, self.wanted
        if kept and encoder_family(kept) is self.family:
            config = kept if encoder_options(kept, wanted, "", Problems()) == self.options else config
        own = described(config, self.family)
        is_bare = wanted.head in ("hidden", "pairs")
        head: HeadName = "hidden" if is_bare and "hidden" in self.family.classes else wanted.head
        if own.head != head or "architectures" not in config:
            config = config | {"architectures": [self.family.classes[head]]}
        if wanted.head == "classify" and own.num != wanted.num:
            labels = [f"LABEL_{i}" for i in range(wanted.num)]
            config = {key: value for key, value in config.items() if key != "num_labels"}
            config |= {"id2label": {str(i): one for i, one in enumerate(labels)},
                       "label2id": {one: i for i, one in enumerate(labels)}}  # fmt: skip
        return config, self.layout.without(self.family.prefix) if is_bare else self.layout

    def causal(self, seq_len: int) -> Any:
        raise ConfigError(
            f"model.kind = encoder: {self.config['model_type']} reads whole rows, and generates no text; "
            "meshpar serve answers with its vectors at /v1/embeddings"
        )


@dataclass(frozen=True)
class EncoderPretrained(FamilyPretrained):
    """A checked folder of an encoder. Tensors of other heads than the model's are left out."""

    model: EncoderModel  # pyright: ignore[reportIncompatibleVariableOverride]

    def _is_model(self, model: EncoderModel) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Whether the towers are the same; the heads may differ."""
        return encoder_options(self.config, model.wanted, "", Problems()) == model.options

    def fitted(self, model: ModelContract) -> EncoderPretrained:
        self.check(model)
        assert isinstance(model, EncoderModel)
        again = opened(self.folder, self.config, model)
        # The tensors of this folder may have the updates of an adapter.
        return replace(again, tensors={name: self.tensors.get(name, one) for name, one in again.tensors.items()})


def open_encoder(folder: Path, config: dict[str, Any]) -> EncoderPretrained:
    """Reads the headers of a folder, whose config is of an encoder; its model has the head of its class.

    Raises:
      CheckpointError: lists every problem, see `open_pretrained`.
    """
    family = encoder_family(config)
    assert family is not None
    problems = Problems()
    own, where = described(config, family), str(folder / CONFIG)
    encoder_options(config, Wanted(own.head, own.num), where, problems)
    problems.raise_any(CheckpointError, f"{folder} cannot be imported:")
    return opened(folder, config, EncoderModel(config=config))


def opened(folder: Path, config: dict[str, Any], model: EncoderModel) -> EncoderPretrained:
    """The folder's tensors for a model, which may have another head than the folder's class.

    Raises:
      CheckpointError: lists the tensors of the tower that are missing, and those that are unknown or of another shape.
    """
    problems = Problems()
    given = tensors_of(folder, problems)
    problems.raise_any(CheckpointError, f"{folder} cannot be imported:")
    check_layers(folder, len(model.options.layers), given)
    family, layout = model.family, model.layout
    tensors = layout.flat(_named(given, family))
    is_own = described(config, family) == Described(model.wanted.head, model.wanted.num)
    heads = {place.name for place in layout.places if place.foreign.parts[0].startswith("head.")}
    left_out = _left_out(tensors, layout.expected, family)
    for name, shape in layout.expected.items():
        if is_own or name not in heads:
            compare_one(name, tensors.get(name), shape, model, problems)
        elif name in tensors and tensors[name].shape != shape:
            left_out.append(name)
    for name in tensors.keys() - layout.expected.keys() - {*left_out}:
        problems.add(name, f"is in {tensors[name].file.name}, but is no parameter of this model")
    problems.raise_any(CheckpointError, f"{folder} does not hold what its {CONFIG} describes:")
    taken = {name: tensors[name] for name in layout.expected if name in tensors and name not in left_out}
    return EncoderPretrained(folder, config, model, layout, taken, left_out=tuple(sorted(left_out)))


def _named(given: Mapping[str, Tensor], family: EncoderFamily) -> dict[str, Tensor]:
    """The tensors by the names of a class with a head: the class without one leaves out the prefix."""
    found: dict[str, Tensor] = {}
    bare = not any(name.startswith(family.prefix) for name in given)
    for name, tensor in given.items():
        for old, new in OLD_NAMES:
            name = name.replace(old, new) if name.endswith(old) else name
        found[f"{family.prefix}{name}" if bare else name] = tensor
    return found


def _left_out(tensors: Mapping[str, Tensor], wanted: Mapping[str, Shape], family: EncoderFamily) -> list[str]:
    """The tensors of other heads, copies of the embedding, and buffers."""
    others = [BUFFER, TIED, *map(re.compile, family.others)]
    return [name for name in tensors if name not in wanted and any(one.fullmatch(name) for one in others)]
