"""What a folder of shards contains, as JSON files: the plan, which the build follows, and the manifest, its result.

plan.json                    what the ids depend on: sources, tokenizer, keys of the config
tokenizer.json               a copy, if the ids are those of a tokenizer file
00000-of-00016/shard.json    the numbers of a finished shard; the folder appears complete, by a rename
00000-of-00016/train.ids     the token ids of all documents, with a place before each for the id that opens it
00000-of-00016/train.opens   a bit for each place: whether it opens a document
00000-of-00016/held_out.*    the same of the held-out documents
manifest.json                written last: what a run needs to know of all shards
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
from pydantic import Field

from meshpar.checkpoint.durable import sync
from meshpar.data.documents import no_data
from meshpar.data.tokenizer import Bytes, Ids, TokenizerFile
from meshpar.data.unmodified import kept_while_unmodified
from meshpar.errors import DataError
from meshpar.regular_files import nearby, open_regular

VERSION = 1
MANIFEST = "manifest.json"
PLAN = "plan.json"
SHARD = "shard.json"
TOKENIZER = "tokenizer.json"
TRAIN, HELD_OUT = "train", "held_out"
_LARGEST = 2**30
Natural = Annotated[int, Field(ge=0)]


class _Record(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)


class Side(_Record):
    """The training documents of a shard, or the held-out ones. `tokens` include one place a document that opens it."""

    documents: Natural
    tokens: Natural


class ShardNumbers(_Record):
    """The numbers of one shard.

    Args:
      crc32: file name -> checksum.
      shares: the two lowest and the two highest shares of its documents, see `Documents`.
    """

    train: Side
    held_out: Side
    crc32: dict[str, Natural]
    shares: list[float]

    @property
    def documents(self) -> int:
        return self.train.documents + self.held_out.documents

    @property
    def tokens(self) -> int:
        return self.train.tokens + self.held_out.tokens

    def side(self, name: str) -> Side:
        return self.train if name == TRAIN else self.held_out

    def sizes(self, dtype: np.dtype) -> dict[str, int]:
        """File name -> bytes."""
        sizes = {}
        for name in (TRAIN, HELD_OUT):
            tokens = self.side(name).tokens
            sizes |= {f"{name}.ids": tokens * dtype.itemsize, f"{name}.opens": -(-tokens // 8)}
        return sizes


class StoredTokenizer(_Record):
    """The tokenizer of the ids, and the SHA-256 of its file."""

    kind: Literal["bytes", "ids", "file"]
    vocab_size: Natural
    bos: Natural
    eos: Natural | None
    bos_token: str | None = None
    eos_token: str | None = None
    sha256: str | None = None
    library: str | None = None
    """The version of the tokenizers library."""

    def opened(self, folder: Path) -> Bytes | Ids | TokenizerFile:
        if self.kind == "bytes":
            return Bytes()
        if self.kind == "ids":
            return Ids(vocab_size=self.vocab_size, bos=self.bos, eos=self.eos)
        return TokenizerFile(path=str(folder / TOKENIZER), bos_token=self.bos_token, eos_token=self.eos_token)


class BuildPlan(_Record):
    """What the ids depend on. A build goes on only with the same.

    Args:
      encoding: the keys of the config that say how the files are read.
      sources: (name, bytes, time of its last change in ns) of each file.
    """

    version: Natural
    encoding: dict[str, Any]
    tokenizer: StoredTokenizer
    held_out_fraction: float
    shard_bytes: Natural
    sources: list[tuple[str, Natural, int]]


class Manifest(_Record):
    """What a run needs to know of finished shards."""

    version: Natural
    dtype: Literal["uint8", "uint16", "uint32"]
    tokenizer: StoredTokenizer
    held_out_fraction: float
    sources: str
    """The SHA-256 of the plan, which names the sources."""
    shards: list[ShardNumbers]


def shard_name(index: int, num: int) -> str:
    """The name of a shard's folder."""
    return f"{index:05}-of-{num:05}"


def write(path: Path, record: _Record) -> None:
    """Writes a file that appears complete, by a rename."""
    partial = path.with_name(f"partial-{os.getpid()}-{path.name}")
    partial.write_text(record.model_dump_json(), encoding="utf-8")
    sync(partial)
    partial.rename(path)
    sync(path.parent)


def read(path: Path, kind: type[Any], fix: str) -> Any:
    """A record of this kind, from its file.

    Raises:
      DataError: the file is damaged, or another version of meshpar has written it.
      OSError: it cannot be read.
    """
    with open_regular(path) as file:
        content = file.read(_LARGEST + 1)
    try:
        data = json.loads(content)
        if isinstance(data, dict) and "version" in kind.model_fields and data.get("version") != VERSION:
            what = f"is of version {data.get('version')!r}, and this meshpar reads version {VERSION}"
            raise no_data(str(path), what, fix)
        return kind.model_validate_json(content)
    except DataError:
        raise
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (ValueError, RecursionError) as error:
        what = f"is not JSON: {error}"
    raise no_data(str(path), f"is damaged: {what}", fix)


def manifest(folder: Path) -> Manifest:
    """The manifest of a folder of shards.

    Raises:
      DataError: there is none, it is damaged or of another version, or a shard is missing or of another size.
    """
    path = folder / MANIFEST
    again = "meshpar data build CONFIG --output " + str(folder)
    try:
        return _manifest(path)
    except FileNotFoundError:
        if (folder / PLAN).is_file():
            raise no_data(str(folder), "its build has not ended", f"{again} goes on with it") from None
        what = "is no folder of shards" if folder.is_dir() else "there is no such folder"
        raise no_data(f"data.path = {str(folder)!r}", what, "; ".join(filter(None, [again, nearby(folder)]))) from None
    except OSError as error:
        raise no_data(str(path), f"cannot be read: {error.strerror}") from None


@kept_while_unmodified(4)
def _manifest(path: Path) -> Manifest:
    return read(path, Manifest, "build the shards again in an empty folder")


def damages(folder: Path, shard: ShardNumbers, dtype: np.dtype) -> list[tuple[Path, str]]:
    """Each file of a shard that is missing or has another size, and what is wrong with it."""
    damaged = []
    for name, size in shard.sizes(dtype).items():
        path = folder / name
        try:
            there = path.stat().st_size
        except OSError as error:
            damaged.append((path, f"cannot be read: {error.strerror}"))
            continue
        if there != size:
            at = there // dtype.itemsize if name.endswith(".ids") else there * 8
            what = f"ends at token {at}" if there < size else "has more than its tokens"
            damaged.append((path, f"{what}: it has {there} bytes, and {size} were written"))
    return damaged


def extremes(shares: Sequence[float]) -> list[float]:
    """The two lowest and the two highest of sorted shares."""
    return [*shares[:2], *shares[2:][-2:]]
