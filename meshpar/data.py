"""Data sets and tokenizers.

>>> from meshpar import data
>>> data.Text(path="texts", tokenizer=data.Bytes()).vocab_size
257
"""

from meshpar.train.data import (
    ArrayRecord,
    Arrow,
    Bytes,
    Chat,
    Ids,
    Jsonl,
    LinearWeights,
    Mixture,
    MixtureComponent,
    NoData,
    Numpy,
    Parquet,
    PiecewiseWeights,
    Preferences,
    Prompts,
    Shards,
    StandardLibrary,
    Synthetic,
    Text,
    TokenizerFile,
    WebDataset,
)

__all__ = [
    "ArrayRecord", "Arrow", "Bytes", "Chat", "Ids", "Jsonl", "LinearWeights", "Mixture",
    "MixtureComponent", "NoData", "Numpy", "Parquet", "PiecewiseWeights", "Preferences", "Prompts", "Shards",
    "StandardLibrary", "Synthetic", "Text", "TokenizerFile", "WebDataset",
]  # fmt: skip
