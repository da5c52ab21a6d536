"""Tar files as WebDataset writes them: `0017.txt` is a document. Nothing is extracted."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from io import BufferedReader
from typing import Literal

from meshpar.data.corpus import AtPath, TextCorpus
from meshpar.data.documents import HEADING
from meshpar.data.encode import Content
from meshpar.data.file_ranges import FileRange
from meshpar.data.files import cut_off
from meshpar.errors import DataError, Problems
from meshpar.regular_files import open_regular

GLOB = "**/*.tar"
END = bytes(2 * tarfile.BLOCKSIZE)
"""What ends a tar file."""


class WebDataset(AtPath, TextCorpus):
    """Tar files, each of whose members with a suffix is a document.

    >>> WebDataset(path="corpus", suffix="md").glob
    '**/*.tar'
    """

    kind: Literal["webdataset"] = "webdataset"
    glob: str = GLOB
    suffix: str = "txt"
    """The suffix of the members that are documents: what follows the first dot."""

    def read(self, part: FileRange) -> Iterator[Content]:
        problems = Problems()
        for path in part.files:
            others: set[str] = set()
            num = 0
            try:
                with open_regular(path) as file:
                    for member in members(file):
                        suffix = named(member)[1]
                        if suffix == self.suffix:
                            num += 1
                            content = os.pread(file.fileno(), member.size, member.offset_data)
                            yield Content(f"{path}, {member.name}", content.decode("utf-8", "surrogateescape"))
                        else:
                            others.add(suffix)
                if others and not num:
                    fix = f"data.suffix is one of {', '.join(sorted(others)[:9])}"
                    problems.add(str(path), f"has no member with the suffix {self.suffix!r}", fix)
            except ValueError as error:
                problems.add(str(path), *error.args)
        problems.raise_any(DataError, HEADING)


def members(file: BufferedReader) -> Iterator[tarfile.TarInfo]:
    """The members of a tar file that are files, in order.

    Raises:
      ValueError: (what is wrong, fix), it is not whole.
    """
    whole = os.fstat(file.fileno()).st_size
    end = 0
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                end = max(end, member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE)
                if end > whole:
                    break
                if member.isfile():
                    yield member
    except tarfile.TarError as error:
        raise cut_off(f"is no whole tar file ({error})") from None
    if end > whole or os.pread(file.fileno(), len(END), end)[: len(END)] != END:
        raise cut_off("does not end as a tar file does")


def named(member: tarfile.TarInfo) -> tuple[str, str]:
    """The name of a row, and the suffix of a member of it.

    >>> named(tarfile.TarInfo("a/0017.seg.png"))
    ('a/0017', 'seg.png')
    """
    folder, _, base = member.name.rpartition("/")
    name, _, suffix = base.partition(".")
    return f"{folder}/{name}".lstrip("/"), suffix
