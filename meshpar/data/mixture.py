"""Mixtures of corpora, interleaved by weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from meshpar.config import Coerced, Config, Section, default
from meshpar.data.array_record import ArrayRecord
from meshpar.data.arrow import Arrow, Parquet
from meshpar.data.chat.corpus import Chat
from meshpar.data.corpus import Batching, Corpus, StandardLibrary, Synthetic, Text
from meshpar.data.jsonl import Jsonl
from meshpar.data.numpy_files import Numpy
from meshpar.data.round_robin import check_period, whole_weights
from meshpar.data.shards.config import Shards
from meshpar.data.tars import WebDataset
from meshpar.data.tokenizer import Tokenizer
from meshpar.data.weights import Phase, WeightSchedule

AnyCorpus = (
    Text | StandardLibrary | Synthetic | Jsonl | Chat | Parquet | Arrow | ArrayRecord | WebDataset | Numpy | Shards
)


class MixtureComponent(Config):
    """A corpus in a mixture."""

    weight: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """The number of its rows, relative to the other parts. Refused with a schedule of `weights`, required without."""
    data: Section[Annotated[AnyCorpus, Field(discriminator="kind")]]
    """The corpus. It has the mixture's `batch_size` and `seq_len`."""


class Mixture(Batching):
    """Corpora that are interleaved row by row, by their weights. A part that ends starts again, in another order.

    The keys that all corpora have (`batch_size`, `seq_len`, `held_out_fraction`, `if_changed`, ...) are set here, and
    not in the parts. The held-out documents of all parts are read once, part after part, independent of the weights.

    >>> mixture = Mixture(seq_len=64, parts=[{"weight": w, "data": {"kind": "synthetic"}} for w in (0.7, 0.3)])
    >>> mixture.phases, [corpus.seq_len for corpus in mixture.corpora]
    ((Phase(step=0, weights=(7, 3)),), [64, 64])
    """

    kind: Literal["mixture"] = "mixture"
    parts: Coerced[tuple[MixtureComponent, ...], Sequence[MixtureComponent | dict[str, Any]]]
    """The corpora and their weights."""
    weights: Coerced[WeightSchedule | None, dict[str, Any]] = default(None)
    """How the weights change over the steps. Default: they are those of the parts."""

    @property
    def corpora(self) -> list[Corpus]:
        return [part.data for part in self.parts]

    @property
    def phases(self) -> tuple[Phase, ...]:
        if self.weights is not None:
            return self.weights.phases
        return (Phase(0, whole_weights([part.weight for part in self.parts if part.weight is not None])),)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.parts[0].data.tokenizer

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @model_validator(mode="before")
    @classmethod
    def _complete_parts(cls, data: Any) -> Any:
        """Applies the settings of the mixture to each part that does not set them itself."""
        if not isinstance(data, dict) or not isinstance(data.get("parts"), (list, tuple)):
            return data
        shared = {key: data[key] for key in Batching.model_fields if key in data}
        return data | {"parts": tuple(_completed(part, shared) for part in data["parts"])}

    @model_validator(mode="after")
    def _check(self) -> Mixture:
        if not self.parts:
            raise ValueError("a mixture needs at least one part")
        wrong = [line for i, part in enumerate(self.parts) for line in self._differences(f"parts.{i}.data", part.data)]
        wrong += self._faults_of_weights()
        if wrong:
            raise ValueError("\n".join(wrong))
        check_period(self.phases[0].weights)
        return self

    def _faults_of_weights(self) -> list[str]:
        if self.weights is None:
            missing = [i for i, part in enumerate(self.parts) if part.weight is None]
            return [f"parts.{i}.weight is missing: the number of its rows, relative to the others" for i in missing]
        twice = [i for i, part in enumerate(self.parts) if part.weight is not None]
        lines = [f"parts.{i}.weight is set, and weights say how it changes: remove one of them" for i in twice]
        if (num := len(self.weights.phases[0].weights)) != len(self.parts):
            lines.append(f"weights has {num} of them, and there are {len(self.parts)} parts")
        return lines

    def _differences(self, where: str, part: Corpus) -> list[str]:
        lines = []
        for key in Batching.model_fields:
            ours = getattr(self, key)
            theirs = getattr(part, key)
            if theirs != ours:
                lines.append(f"{where}.{key} is {theirs}, but {ours} for the mixture: set it only for the mixture")
        if part.tokenizer != self.tokenizer:  # pyright: ignore
            lines.append(f"{where}.tokenizer differs from that of parts.0.data: all parts share one vocabulary")
        return lines


def _completed(part: Any, shared: dict[str, Any]) -> Any:
    if isinstance(part, MixtureComponent):
        new = {key: value for key, value in shared.items() if key not in part.data.model_fields_set}
        return part.model_copy(update={"data": part.data.model_copy(update=new)})
    if isinstance(part, dict) and isinstance(part.get("data"), dict):
        return part | {"data": shared | part["data"]}
    return part
