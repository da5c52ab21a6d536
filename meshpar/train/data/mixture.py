"""Mixtures of corpora."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from meshpar.config import Config
from meshpar.train.data.arrow import Arrow, Parquet
from meshpar.train.data.corpus import Batching, Corpus, StandardLibrary, Synthetic, Text
from meshpar.train.data.jsonl import Jsonl
from meshpar.train.data.numpy_files import Numpy
from meshpar.train.data.tokenizer import Tokenizer
from meshpar.train.data.turns import LONGEST, whole_weights

Source = Annotated[Text | StandardLibrary | Synthetic | Jsonl | Parquet | Arrow | Numpy, Field(discriminator="kind")]


class Part(Config):
    """A corpus in a mixture."""

    weight: float = Field(gt=0, allow_inf_nan=False)
    """How many rows are of this part, in proportion to the weights of the others."""
    data: Source


class Mixture(Batching):
    """Corpora that take turns, row by row, by their weights; each begins anew when it has been read.

    What all corpora have (`batch_size`, `seq_len`, `held_out_fraction`) is said here, and not by the parts. Held out
    are the held-out documents of all parts, one part after the other, whatever their weights.

    >>> mixture = Mixture(seq_len=64, parts=[{"weight": w, "data": {"kind": "synthetic"}} for w in (0.7, 0.3)])
    >>> [(weight, corpus.seq_len) for weight, corpus in mixture.sources]
    [(7, 64), (3, 64)]
    """

    kind: Literal["mixture"] = "mixture"
    parts: tuple[Part, ...]

    @property
    def sources(self) -> list[tuple[int, Corpus]]:
        weights = whole_weights([part.weight for part in self.parts])
        return [(weight, part.data) for weight, part in zip(weights, self.parts, strict=True)]

    @property
    def tokenizer(self) -> Tokenizer:
        return self.parts[0].data.tokenizer

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @model_validator(mode="before")
    @classmethod
    def _tell_the_parts(cls, data: Any) -> Any:
        """What is said here, and not by a part, holds for the part."""
        if not isinstance(data, dict) or not isinstance(data.get("parts"), (list, tuple)):
            return data
        said = {key: data[key] for key in Batching.model_fields if key in data}
        return data | {"parts": tuple(_told(part, said) for part in data["parts"])}

    @model_validator(mode="after")
    def _check(self) -> Mixture:
        if not self.parts:
            raise ValueError("a mixture has at least one part")
        wrong = [line for i, part in enumerate(self.parts) for line in self._differences(f"parts.{i}.data", part.data)]
        weights = whole_weights([part.weight for part in self.parts])
        if sum(weights) > LONGEST:
            rounded = ", ".join(str(max(1, round(1000 * weight / sum(weights)))) for weight in weights)
            wrong.append(f"weights have too many digits: a turn of all would take {sum(weights)} rows, not {LONGEST}")
            wrong.append(f"round them, to {rounded} for example")
        if wrong:
            raise ValueError("\n".join(wrong))
        return self

    def _differences(self, where: str, part: Corpus) -> list[str]:
        keys = [key for key in Batching.model_fields if getattr(part, key) != getattr(self, key)]
        lines = [
            f"{where}.{key} is {getattr(part, key)}, but {getattr(self, key)} for the mixture: write it only there"
            for key in keys
        ]
        if part.tokenizer != self.tokenizer:  # pyright: ignore
            lines.append(f"{where}.tokenizer differs from that of parts.0.data: a mixture has one vocabulary")
        return lines


def _told(part: Any, said: dict[str, Any]) -> Any:
    if isinstance(part, Part):
        new = {key: value for key, value in said.items() if key not in part.data.model_fields_set}
        return part.model_copy(update={"data": part.data.model_copy(update=new)})
    if isinstance(part, dict) and isinstance(part.get("data"), dict):
        return part | {"data": said | part["data"]}
    return part
