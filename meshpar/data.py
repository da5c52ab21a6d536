"""Data sets and tokenizers.

>>> from meshpar import data
>>> data.Text(path="texts", tokenizer=data.Bytes()).vocab_size
257
"""

from meshpar.train.data import (
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
)

__all__ = [
    "Arrow", "Bytes", "Chat", "Ids", "Jsonl", "LinearWeights", "Mixture", "MixtureComponent", "NoData", "Numpy",
    "Parquet", "PiecewiseWeights", "Preferences", "Prompts", "Shards", "StandardLibrary", "Synthetic", "Text",
    "TokenizerFile",
]  # fmt: skip
