"""Data sets and tokenizers.

>>> from meshpar import data
>>> data.Text(path="texts", tokenizer=data.Bytes()).vocab_size
257
"""

from typing import Annotated

from pydantic import Field

from meshpar.data.array_record import ArrayRecord
from meshpar.data.arrow import Arrow, Parquet
from meshpar.data.chat.corpus import Chat
from meshpar.data.chat.preferences import Preferences
from meshpar.data.chat.prompts import Prompts
from meshpar.data.corpus import NoData, StandardLibrary, Synthetic, Text
from meshpar.data.jsonl import Jsonl
from meshpar.data.mixture import AnyCorpus, Mixture, MixtureComponent
from meshpar.data.numpy_files import Numpy
from meshpar.data.shards.config import Shards
from meshpar.data.tars import WebDataset
from meshpar.data.tokenizer import Bytes, Ids, TokenizerFile
from meshpar.data.weights import LinearWeights, PiecewiseWeights

__all__ = [
    "ArrayRecord", "Arrow", "Bytes", "Chat", "Ids", "Jsonl", "LinearWeights", "Mixture",
    "MixtureComponent", "NoData", "Numpy", "Parquet", "PiecewiseWeights", "Preferences", "Prompts", "Shards",
    "StandardLibrary", "Synthetic", "Text", "TokenizerFile", "WebDataset",
]  # fmt: skip

Data = Annotated[AnyCorpus | Mixture | NoData | Preferences | Prompts, Field(discriminator="kind")]
"""The data set of a run, selected by `kind`."""
