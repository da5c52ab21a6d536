"""The data sets of a run, selected by `kind`."""

from typing import Annotated

from pydantic import Field

from meshpar.train.data.array_record import ArrayRecord
from meshpar.train.data.arrow import Arrow, Parquet
from meshpar.train.data.chat.corpus import Chat
from meshpar.train.data.chat.preferences import Preferences
from meshpar.train.data.chat.prompts import Prompts
from meshpar.train.data.corpus import NoData, StandardLibrary, Synthetic, Text
from meshpar.train.data.dataset import Dataset
from meshpar.train.data.jsonl import Jsonl
from meshpar.train.data.mixture import AnyCorpus, Mixture, MixtureComponent
from meshpar.train.data.numpy_files import Numpy
from meshpar.train.data.shards.config import Shards
from meshpar.train.data.tars import WebDataset
from meshpar.train.data.tokenizer import Bytes, Ids, TokenizerFile
from meshpar.train.data.weights import LinearWeights, PiecewiseWeights

__all__ = [
    "ArrayRecord", "Arrow", "Bytes", "Chat", "Data", "Dataset", "Ids", "Jsonl", "LinearWeights", "Mixture",
    "MixtureComponent", "NoData", "Numpy", "Parquet", "PiecewiseWeights", "Preferences", "Prompts", "Shards",
    "StandardLibrary", "Synthetic", "Text", "TokenizerFile", "WebDataset",
]  # fmt: skip

Data = Annotated[AnyCorpus | Mixture | NoData | Preferences | Prompts, Field(discriminator="kind")]
