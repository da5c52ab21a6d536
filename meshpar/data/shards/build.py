"""Encodes a corpus once, in shards, by several processes. A build that was stopped goes on with what is missing."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np

from meshpar.checkpoint.durable import make_folder, sync
from meshpar.data.corpus import TextCorpus
from meshpar.data.documents import HEADING, no_data, one_sided
from meshpar.data.file_ranges import FileRange, cut
from meshpar.data.files import named
from meshpar.data.fingerprint import checksum, crc32
from meshpar.data.shards.manifest import (
    HELD_OUT,
    MANIFEST,
    PLAN,
    SHARD,
    TOKENIZER,
    TRAIN,
    VERSION,
    BuildPlan,
    Manifest,
    ShardNumbers,
    Side,
    StoredTokenizer,
    damages,
    extremes,
    read,
    shard_name,
    write,
)
from meshpar.data.shards.stored import SideWriter
from meshpar.data.tokenizer import Tokenizer, TokenizerFile
from meshpar.data.whole_folder import PARTIAL, discard, partial_name, writing, written
from meshpar.errors import DataError, DataWarning, Problems, RunError

SHARD_BYTES = 2**28
MOST_FAILED = 10
"""Shards that cannot be encoded before a build ends: their errors are reported together."""
NEW_FOLDER = "build into another folder, or remove this one"


@dataclass(frozen=True)
class Built:
    """What a build did.

    Args:
      missing: shards that other builds of the same folder have to encode.
      encoded: token ids that this build has encoded.
    """

    folder: Path
    shards: int
    missing: int
    documents: int
    tokens: int
    encoded: int
    seconds: float

    def __str__(self) -> str:
        rate = f"{self.encoded:,} tokens encoded in {self.seconds:.1f} s"
        if self.encoded:
            rate += f", {self.encoded / self.seconds:,.0f} a second"
        if self.missing:
            return f"{rate}\n{self.folder}: {self.missing} of {self.shards} shards are missing: other parts encode them"
        shards = "1 shard" if self.shards == 1 else f"{self.shards} shards"
        num = f"{self.documents:,} documents, {self.tokens:,} tokens in {shards}"
        return f"{rate}\n{self.folder}: {num}\ndata: {{kind: shards, path: {self.folder}}}"

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "folder": str(self.folder)}


def build(
    corpus: TextCorpus,
    folder: Path,
    processes: int = 1,
    shard_bytes: int = SHARD_BYTES,
    part: tuple[int, int] = (1, 1),
    say: Callable[[str], None] = lambda line: None,
) -> Built:
    """Writes the token ids of a corpus to a folder. A shard that is finished is not encoded again.

    Args:
      shard_bytes: bytes of the files that become one shard, about.
      part: (i, n): encodes only each n-th shard, from the i-th on; other hosts that see the folder encode the others.
      say: receives a line for each shard.

    Raises:
      DataError: the documents cannot be read or encoded; the folder was begun from other files or with another
        tokenizer, or cannot be written.
      RunError: a process was killed.

    Warns:
      DataWarning: a finished shard is damaged, and is encoded again.
    """
    began = time.monotonic()
    files = corpus.files()
    plan = _plan(corpus, files, shard_bytes)
    with writing(_option(folder)):
        _begin(folder, plan, corpus.tokenizer)
    ranges = list(cut(files, shard_bytes, corpus.units))
    finished = {i: shard for i in range(len(ranges)) if (shard := _finished(folder, i, len(ranges), corpus.ids_dtype))}
    mine = [i for i in range(part[0] - 1, len(ranges), part[1]) if i not in finished]
    tasks = {i: partial(_encode, corpus, ranges[i], folder, shard_name(i, len(ranges))) for i in mine}
    for i, shard in _run(tasks, processes):
        finished[i] = shard
        num = f"{shard.documents:,} documents, {shard.tokens:,} tokens"
        say(f"shard {i + 1} of {len(ranges)}: {num}")
    _agree(folder, plan, _plan(corpus, files, shard_bytes), "while they were read")
    missing = len(ranges) - len(finished)
    if not missing:
        with writing(_option(folder)):
            _publish(folder, plan, [finished[i] for i in range(len(ranges))], corpus.ids_dtype)
    return Built(
        folder=folder,
        shards=len(ranges),
        missing=missing,
        documents=sum(shard.documents for shard in finished.values()),
        tokens=sum(shard.tokens for shard in finished.values()),
        encoded=sum(finished[i].tokens for i in mine),
        seconds=time.monotonic() - began,
    )


# The plan -------------------------------------------------------------------------------------------------------


def _plan(corpus: TextCorpus, files: Sequence[Path], shard_bytes: int) -> BuildPlan:
    problems = Problems()
    sources = []
    for name, path in named(list(files), corpus.root).items():
        try:
            stat = path.stat()
            sources.append((name, stat.st_size, stat.st_mtime_ns))
        except OSError as error:
            problems.add(str(path), f"cannot be read: {error.strerror}")
    problems.raise_any(DataError, HEADING)
    encoding = {key: value for key, value in corpus.encoding.items() if key not in ("path", "tokenizer")}
    return BuildPlan(
        version=VERSION, encoding=encoding, tokenizer=_stored(corpus.tokenizer), sources=sources,
        held_out_fraction=corpus.held_out_fraction, shard_bytes=shard_bytes,
    )  # fmt: skip


def _stored(tokenizer: Tokenizer) -> StoredTokenizer:
    about = {"vocab_size": tokenizer.vocab_size, "bos": tokenizer.bos, "eos": tokenizer.eos, "kind": tokenizer.kind}
    if isinstance(tokenizer, TokenizerFile):
        from tokenizers import __version__

        about |= {"sha256": checksum(Path(tokenizer.path)), "library": __version__}
        about |= {"bos_token": tokenizer.token(tokenizer.bos)}
        about |= {"eos_token": None if tokenizer.eos is None else tokenizer.token(tokenizer.eos)}
    return StoredTokenizer(**about)


def _begin(folder: Path, plan: BuildPlan, tokenizer: Tokenizer) -> None:
    """Writes the plan into a new folder; in another it must be the same."""
    if (folder / PLAN).is_file():
        before = read(folder / PLAN, BuildPlan, NEW_FOLDER)
        _agree(folder, before, plan, "since this build began")
    elif folder.is_dir() and any(not one.name.startswith(PARTIAL) for one in folder.iterdir()):
        raise no_data(_option(folder), "has other files than shards", "a folder that is empty or not there")
    make_folder(folder)
    if isinstance(tokenizer, TokenizerFile):
        copy = folder / TOKENIZER
        if not copy.is_file() or checksum(copy) != plan.tokenizer.sha256:
            partial_copy = partial_name(copy)
            shutil.copyfile(tokenizer.path, partial_copy)
            sync(partial_copy)
            partial_copy.rename(copy)
    if not (folder / PLAN).is_file():
        write(folder / PLAN, plan)


def _agree(folder: Path, before: BuildPlan, now: BuildPlan, since: str) -> None:
    """Refuses to mix the shards of two plans."""
    problems = Problems()
    old, new = ({name: rest for name, *rest in plan.sources} for plan in (before, now))
    for name in sorted(old.keys() | new.keys()):
        if name not in new or name not in old:
            problems.add(name, "is missing" if name not in new else "is new")
        elif old[name] != new[name]:
            sizes = [rest[name][0] for rest in (old, new)]
            what = "was written to" if sizes[0] == sizes[1] else f"had {sizes[0]} bytes and has {sizes[1]}"
            problems.add(name, what)
    was, is_now = (plan.model_dump(exclude={"sources"}) for plan in (before, now))
    was, is_now = (one | one.pop("encoding") | _as_keys(one.pop("tokenizer")) for one in (was, is_now))
    for key in sorted(was.keys() | is_now.keys()):
        if was.get(key) != is_now.get(key):
            problems.add(key, f"was {was.get(key)}, and is {is_now.get(key)}")
    if problems.found:
        problems.add(
            str(folder), f"its shards would not fit each other: what they depend on has changed {since}", NEW_FOLDER
        )
    problems.raise_any(DataError, "the build cannot go on:")


def _as_keys(tokenizer: dict[str, Any]) -> dict[str, Any]:
    return {f"tokenizer: {key}": value for key, value in tokenizer.items()}


# Shards ---------------------------------------------------------------------------------------------------------


def _run(tasks: dict[int, Callable[[], ShardNumbers]], processes: int) -> Iterator[tuple[int, ShardNumbers]]:
    """(number, shard) of each task, as it ends. The errors of several are raised together."""
    failed: list[DataError] = []
    if min(processes, len(tasks)) <= 1:
        done: Iterator[tuple[int, Callable[[], ShardNumbers]]] = iter(tasks.items())
        yield from _results(done, failed)
    else:
        context = multiprocessing.get_context("spawn")  # JAX has threads, which a fork would not copy
        with ProcessPoolExecutor(processes, context, _alone) as pool:
            futures: dict[Future[ShardNumbers], int] = {pool.submit(task): i for i, task in tasks.items()}
            try:
                yield from _results(((futures[one], one.result) for one in as_completed(futures)), failed)
            except BrokenProcessPool:
                what = "a process of the build was killed, perhaps because memory was short"
                raise RunError(f"{what}; the same command goes on with the shards that are finished") from None
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
    if failed:
        raise DataError("\n".join([HEADING, *(str(error).removeprefix(f"{HEADING}\n") for error in failed)]))


def _results(
    done: Iterator[tuple[int, Callable[[], ShardNumbers]]], failed: list[DataError]
) -> Iterator[tuple[int, ShardNumbers]]:  # fmt: skip
    for i, result in done:
        try:
            yield i, result()
        except DataError as error:
            failed.append(error)
            if len(failed) == MOST_FAILED:
                return


def _alone() -> None:
    """The processes are parallel, so that the tokenizer's own threads would only get in their way.

    One whose parent was killed ends: it would wait for a task forever.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent, "a process of the pool has one"
    parent.join()
    os._exit(1)


def _encode(corpus: TextCorpus, files: FileRange, folder: Path, name: str) -> ShardNumbers:
    """Writes one shard."""
    dtype = corpus.ids_dtype
    shares: list[float] = []
    with written(folder / name, _option(folder)) as partial, writing(_option(folder)):
        with SideWriter(partial / TRAIN, dtype) as train, SideWriter(partial / HELD_OUT, dtype) as held_out:
            for share, ids in _read(corpus, files):
                (held_out if share < corpus.held_out_fraction else train).add(ids)
                shares = extremes(sorted([*shares, share]))
        sides = [Side(documents=one.num_documents, tokens=one.num_tokens) for one in (train, held_out)]
        shard = ShardNumbers(train=sides[0], held_out=sides[1], crc32=train.crc32 | held_out.crc32, shares=shares)
        write(partial / SHARD, shard)
    return shard


def _read(corpus: TextCorpus, files: FileRange) -> Iterator[tuple[float, np.ndarray]]:
    try:
        yield from corpus.encoded(files)
    except OSError as error:
        raise no_data(str(error.filename or files.files[0]), f"cannot be read: {error.strerror}") from None


def _finished(folder: Path, index: int, num: int, dtype: np.dtype) -> ShardNumbers | None:
    """A shard that is there and undamaged; a damaged one is removed."""
    place = folder / shard_name(index, num)
    if not place.is_dir():
        return None
    try:
        shard = read(place / SHARD, ShardNumbers, "")
        damaged = [path.name for path, _ in damages(place, shard, dtype)]
        damaged = damaged or [name for name, crc in shard.crc32.items() if crc32(place / name) != crc]
    except (DataError, OSError):
        damaged = [SHARD]
    else:
        if not damaged:
            return shard
    warnings.warn(f"{place}: damaged ({', '.join(damaged)}); it is encoded again", DataWarning, stacklevel=3)
    discard(place, _option(folder))
    return None


def _publish(folder: Path, plan: BuildPlan, shards: list[ShardNumbers], dtype: np.dtype) -> None:
    """Writes the manifest: from now on the shards can be read."""
    num = sum(shard.documents for shard in shards)
    if not all(sum(shard.side(side).documents for shard in shards) for side in (TRAIN, HELD_OUT)):
        shares = extremes(sorted(share for shard in shards for share in shard.shares))
        raise one_sided(shares, num, plan.held_out_fraction)
    manifest = Manifest(
        version=VERSION, dtype=dtype.name, tokenizer=plan.tokenizer,  # pyright: ignore
        held_out_fraction=plan.held_out_fraction, sources=checksum(folder / PLAN), shards=shards,
    )  # fmt: skip
    write(folder / MANIFEST, manifest)
    for left in folder.glob(f"{PARTIAL}*"):  # of builds that were killed
        shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


def _option(folder: Path) -> str:
    return f"--output {folder}"
