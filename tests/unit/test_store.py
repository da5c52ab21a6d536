"""Data at addresses of object stores: copied once, compared at each start, and refused where the store fails or lies.

The store is fsspec's own of local files, whose calls these tests make fail. What they prove holds for each of fsspec's.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem

from meshpar import ConfigError, DataError, Images, Text, store
from tests import pictures

BATCHES = {"batch_size": 2, "seq_len": 16, "held_out_fraction": 0.3}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHPAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "FIRST_WAIT_S", 0.0)
    store._copied.cache_clear()


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    (folder / "more").mkdir(parents=True)
    for i in range(12):
        (folder / ("more" if i % 2 else "") / f"{i}.txt").write_text(f"Text {i} of the store. " * (i + 1))
    return folder


def again(address):
    store._copied.cache_clear()
    return store.local(address)


def test_texts_and_their_checksums_are_those_of_a_local_folder(texts):
    here, there = (Text(path=path, **BATCHES) for path in (str(texts), f"file://{texts}"))
    for one, other in zip(here.datasets(0), there.datasets(0), strict=True):
        for name, x in one[0].items():
            np.testing.assert_array_equal(x, other[0][name])
    assert here.fingerprint() == there.fingerprint()


def test_a_single_file_and_pictures_are_read(texts, tmp_path):
    assert store.local(f"file://{texts}/0.txt").read_bytes() == (texts / "0.txt").read_bytes()
    path = pictures.write_folders(tmp_path / "pictures", pictures.pictures())
    here, there = (Images(path=p, size=(8, 8)).datasets(0)[0] for p in (str(path), f"file://{path}"))
    np.testing.assert_array_equal(here.rows(0, [3])["image"], there.rows(0, [3])["image"])


def test_only_what_changed_is_copied_again(texts, capsys):
    where = store.local(f"file://{texts}")
    assert "copies 12 files" in capsys.readouterr().err
    again(f"file://{texts}")
    assert capsys.readouterr().err == ""
    (texts / "0.txt").write_text("Text 0, another one.")
    (texts / "2.txt").unlink()
    again(f"file://{texts}")
    assert "copies 1 files" in capsys.readouterr().err
    assert (where / "0.txt").read_text() == "Text 0, another one." and not (where / "2.txt").exists()


def failing(monkeypatch, times, name=""):
    """Makes the copy of files fail so many times."""
    right, calls = LocalFileSystem.get_file, []

    def get_file(self, source, target, **more):
        if source.endswith(name):
            calls.append(source)
            if len(calls) <= times:
                raise ConnectionResetError("reset by peer?X-Amz-Signature=abc")
        return right(self, source, target, **more)

    monkeypatch.setattr(LocalFileSystem, "get_file", get_file)
    return calls


def test_a_store_that_fails_now_and_then_is_tried_again(texts, monkeypatch):
    calls = failing(monkeypatch, store.TRIES - 1)
    assert len([*store.local(f"file://{texts}").rglob("*.txt")]) == 12
    assert len(calls) == 12 + store.TRIES - 1


def test_a_store_that_keeps_failing_ends_in_an_error_and_a_later_copy_goes_on(texts, monkeypatch, capsys):
    failing(monkeypatch, store.TRIES, "5.txt")
    with pytest.raises(DataError) as error:
        store.local(f"file://{texts}")
    said = str(error.value)
    assert "more/5.txt cannot be copied, after 4 tries: ConnectionResetError: reset by peer" in said
    assert "abc" not in said
    copied = len([*(store.folder() / "file").rglob("*.txt")])
    capsys.readouterr()
    again(f"file://{texts}")
    assert 0 < copied < 12 and f"copies {12 - copied} files" in capsys.readouterr().err


def test_a_store_that_lies_about_sizes_is_refused_and_nothing_is_left(texts, monkeypatch):
    right = LocalFileSystem.find

    def find(self, path, **more):
        return {name: info | {"size": info["size"] + 1} for name, info in right(self, path, **more).items()}

    monkeypatch.setattr(LocalFileSystem, "find", find)
    size = os.path.getsize(texts / "0.txt")
    with pytest.raises(DataError, match=f"the store says {size + 1} bytes, and sent {size}"):
        store.local(f"file://{texts}/0.txt")
    assert not [path for path in store.folder().rglob("*") if path.suffix in (".txt", ".partial")]


REFUSED = {
    "file:///tmp/../etc": "leads out of its folder",
    "file:///nowhere/at/all": "has no files: there is no such folder or file",
    "gs://bucket/x": "needs gcsfs, which is not installed: pip install gcsfs",
    "s3://me:word@bucket/x": "s3://... holds a password or a query; set them in the environment instead",
}


@pytest.mark.parametrize("address", REFUSED)
def test_what_cannot_be_read_is_refused(address, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
    with pytest.raises(DataError) as error:
        store.local(address)
    assert REFUSED[address] in str(error.value) and "word@" not in str(error.value)


def test_a_name_that_leads_out_of_the_folder_is_refused(texts, monkeypatch):
    found = {f"{texts}/../../x.txt": {"size": 1}, f"{texts}/0.txt": {"size": 1}}
    monkeypatch.setattr(LocalFileSystem, "find", lambda self, path, **more: found)
    with pytest.raises(DataError, match="leads out of the folder"):
        store.local(f"file://{texts}")


def test_other_schemes_are_refused(texts):
    with pytest.raises(ConfigError, match="remote address"):
        Text(path="http://host/texts", **BATCHES)
