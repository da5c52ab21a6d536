"""Data that `meshpar data build` has encoded."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from meshpar.config import PathText
from meshpar.data.corpus import Corpus
from meshpar.data.documents import HEADING
from meshpar.data.fingerprint import checksum
from meshpar.data.packing import PackedRows
from meshpar.data.shards.manifest import HELD_OUT, MANIFEST, TRAIN, Manifest, damages, manifest, shard_name
from meshpar.data.shards.stored import AGAIN, StoredDocuments
from meshpar.data.tokenizer import Tokenizer, TokenizerFile
from meshpar.errors import DataError, Problems


class Shards(Corpus):
    """A folder that `meshpar data build` has written. Its rows are those of the data that were encoded.

    A process holds only the rows that it reads, whatever the size of the corpus.

    >>> Shards(path="shards", seq_len=1024).kind
    'shards'
    """

    kind: Literal["shards"] = "shards"
    path: PathText
    """The local folder, relative to the working directory."""

    @property
    def manifest(self) -> Manifest:
        """What the folder contains.

        Raises:
          DataError: there are no finished shards, or another version has written them.
        """
        return manifest(Path(self.path))

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the ids; a tokenizer file has a copy in the folder."""
        return self.manifest.tokenizer.opened(Path(self.path))

    @property
    def vocab_size(self) -> int:
        return self.manifest.tokenizer.vocab_size

    def named_files(self) -> dict[str, Path]:
        """The manifest, which has the checksums of all others."""
        return {MANIFEST: Path(self.path) / MANIFEST}

    def rows(self) -> tuple[PackedRows, PackedRows]:
        manifest = self.manifest
        self._check(manifest)
        train, held_out = (self.packed(self._documents(manifest, side)) for side in (TRAIN, HELD_OUT))
        return train, held_out

    def _documents(self, manifest: Manifest, side: str) -> StoredDocuments:
        num = len(manifest.shards)
        sides = [shard.side(side) for shard in manifest.shards]
        return StoredDocuments(
            shards=tuple(Path(self.path) / shard_name(i, num) / side for i in range(num)),
            ends=np.cumsum([one.tokens for one in sides], dtype=np.int64),
            num_documents=sum(one.documents for one in sides),
            dtype=np.dtype(manifest.dtype),
            bos=manifest.tokenizer.bos,
            vocab_size=manifest.tokenizer.vocab_size,
        )

    def _check(self, manifest: Manifest) -> None:
        problems = Problems()
        if manifest.held_out_fraction != self.held_out_fraction:
            what = f"the shards were built with {manifest.held_out_fraction:g}, which decided where each document is"
            fix = f"data.held_out_fraction={manifest.held_out_fraction:g}, or build them again"
            problems.add(f"data.held_out_fraction = {self.held_out_fraction:g}", what, fix)
        num = len(manifest.shards)
        for i, shard in enumerate(manifest.shards):
            for path, what in damages(Path(self.path) / shard_name(i, num), shard, np.dtype(manifest.dtype)):
                problems.add(str(path), what, AGAIN)
        tokenizer = self.tokenizer
        if isinstance(tokenizer, TokenizerFile):
            try:
                is_same = checksum(Path(tokenizer.path)) == manifest.tokenizer.sha256
                what = "" if is_same else "is not the tokenizer that encoded the shards"
            except OSError as error:
                what = f"cannot be read: {error.strerror}"
            if what:
                problems.add(tokenizer.path, what, AGAIN)
        problems.raise_any(DataError, HEADING)
