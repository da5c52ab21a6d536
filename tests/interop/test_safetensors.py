"""meshpar and the safetensors library read each other's files, and both refuse bad ones."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from meshpar.errors import CheckpointError, Problems
from meshpar.interop.safetensors import Written, tensors_in, write

ARRAYS = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.arange(6, dtype=np.float64),
    "empty": np.zeros((0, 2), np.float32),
    "half": np.arange(4, dtype=np.float16).reshape(2, 2),
}


def opened(path):
    problems = Problems()
    tensors = tensors_in(path, problems)
    problems.raise_any(CheckpointError, "the file is bad:")
    return tensors


@pytest.fixture
def file(tmp_path):
    safetensors.numpy.save_file(ARRAYS, tmp_path / "x.safetensors", metadata={"format": "pt"})
    return tmp_path / "x.safetensors"


def test_ranges_of_a_tensor_are_read(file):
    tensors = opened(file)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(tensors[name].read(), array)
        assert tensors[name].dtype == array.dtype
    np.testing.assert_array_equal(tensors["a"].read(slice(1, 3), slice(2, 4)), ARRAYS["a"][1:3, 2:4])
    np.testing.assert_array_equal(tensors["a"].read(columns=slice(0, 1)), ARRAYS["a"][:, :1])
    np.testing.assert_array_equal(tensors["b"].read(slice(2, 5)), ARRAYS["b"][2:5])


def test_the_library_reads_what_is_written(tmp_path):
    brain = np.arange(6).astype(jnp.bfloat16).reshape(2, 3)
    arrays = ARRAYS | {"brain": brain, "turned": ARRAYS["a"].T}
    write(tmp_path / "y", [Written(name, x.dtype, x.shape, lambda x=x: x) for name, x in arrays.items()])
    assert (tmp_path / "y").stat().st_size == sum(x.nbytes for x in arrays.values()) + 8 + _header(tmp_path / "y")[0]
    with safetensors.safe_open(tmp_path / "y", "numpy") as theirs:
        for name, array in arrays.items():
            np.testing.assert_array_equal(theirs.get_tensor(name).view(array.dtype), array)
    for name, array in arrays.items():
        np.testing.assert_array_equal(opened(tmp_path / "y")[name].read(), array)
    with pytest.raises(FileExistsError):
        write(tmp_path / "y", [])


def _header(path):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return length, json.loads(data[8 : 8 + length]), data[8 + length :]


def _with(**changes):
    """Changes the entry of `a` in the header, whose length stays right."""

    def change(length, header, data):
        header["a"] |= changes
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data

    return change


def _text(text):
    return lambda length, header, data: len(text).to_bytes(8, "little") + text + data


WHOLE = _with()
BAD = {
    "cut in the data": (lambda *file: WHOLE(*file)[:-1], "is truncated: it has .* bytes, and its header needs"),
    "cut in the header": (lambda *file: WHOLE(*file)[:20], "is truncated, or no safetensors file: it has 20 bytes,"),
    "cut in the length": (lambda *file: b"\x01\x00", "it has 2 bytes"),
    "empty": (lambda *file: b"", "it has 0 bytes"),
    "a length beyond all files": (lambda *file: b"\xff" * 8 + WHOLE(*file)[8:], "its header alone has 18446744"),
    "a shape that is longer": (_with(shape=[4, 4]), r"a\n.*F32\[4, 4\] needs 64 bytes, but its header gives it 48"),
    "a shape that overflows": (_with(shape=[2**40, 2**40]), "needs 4835703278458516698824704 bytes"),
    "an offset beyond the file": (_with(data_offsets=[0, 480], shape=[30, 4]), "overlaps with|is truncated"),
    "an overlap": (_with(data_offsets=[8, 56]), "overlaps with|leaves a gap"),
    "a negative offset": (_with(data_offsets=[-48, 0]), "has no safetensors header: a has"),
    "a dtype of its own": (_with(dtype="F7"), "dtypes are F64"),
    "a shape that is no list": (_with(shape=12), "a has"),
    "no JSON": (_text(b"{'a': 1}"), "has no safetensors header"),
    "a list": (_text(b"[]"), "it is not a JSON object"),
    "a name twice": (_text(b'{"a": 1, "a": 2}'), "a name is in it twice"),
    "too deep": (_text(b'{"a":' * 100_000), "nested too deeply|no safetensors header"),
    "no text": (_text(b"\xff\xfe"), "has no safetensors header"),
    "a rest": (lambda *file: WHOLE(*file) + b"more", "is too long: it has"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused(case, file):
    change, message = BAD[case]
    file.write_bytes(change(*_header(file)))
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        opened(file)
    with pytest.raises(safetensors.SafetensorError), safetensors.safe_open(file, "numpy"):
        pass


def test_control_the_unchanged_file_is_read(file):
    file.write_bytes(WHOLE(*_header(file)))
    assert opened(file).keys() == ARRAYS.keys()


def test_a_missing_file_is_reported(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        opened(tmp_path / "nothing")


def test_a_file_that_shrinks_while_it_is_read_is_reported(file):
    tensors = opened(file)
    file.write_bytes(file.read_bytes()[:-60])
    with pytest.raises(CheckpointError, match="was truncated while it was read"):
        tensors["a"].read(), tensors["b"].read()
