"""Rows of arrays by index and in streams: each row once an epoch, the same on any processes and workers."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from meshpar.data.rows.dataset import RowDataset, StreamDataset, first_row
from meshpar.data.rows.source import Indexed, Stream, as_source
from meshpar.data.rows.spec import COUNTED, RowSpec
from meshpar.errors import DataError
from tests.tasks import own

NUM = 30
FIELDS = ("x", "label", "y")


def numbered(num=NUM):
    return {"number": np.arange(num)}


def read(make, seed=0, batch_size=4, **more):
    source = as_source(make, "own:rows")
    spec = RowSpec.of(*first_row(source))
    kind = RowDataset if isinstance(source, Indexed) else StreamDataset
    return kind(source, spec, batch_size, seed, **more)


def same(one, other):
    assert one.keys() == other.keys()
    for name, x in one.items():
        np.testing.assert_array_equal(x, other[name])


@pytest.mark.parametrize("make", [lambda: own.items(NUM), lambda: own.of_grain(NUM), lambda: own.columns(NUM)])
def test_rows_by_index_are_those_of_the_source(make):
    batch = read(make, seed=None, batch_size=NUM).rows(0, np.arange(NUM))
    same(batch, own.columns(NUM) | {"y": own.columns(NUM)["y"].astype("f"), COUNTED: np.ones(NUM)})


@pytest.mark.parametrize("make", [lambda: own.stream(NUM), lambda: own.of_grain(NUM, iterates=True)])
def test_a_stream_keeps_its_order_and_begins_again(make):
    data = read(make, batch_size=12)
    labels = np.concatenate([batch["label"] for batch in islice(data.batches(), 5)])
    np.testing.assert_array_equal(labels, np.resize(own.columns(NUM)["label"], 60))


def test_each_row_is_read_once_an_epoch_in_another_order():
    rows = np.concatenate([batch["number"] for batch in islice(read(numbered).batches(), 15)])
    first, second = rows[:NUM], rows[NUM:]
    assert sorted(first) == sorted(second) == list(range(NUM))
    assert first.tolist() != second.tolist() != list(range(NUM))
    other = np.concatenate([batch["number"] for batch in islice(read(numbered, seed=1).batches(), 7)])
    assert other.tolist() != rows[:28].tolist()


def numbers():
    return ({"number": i} for i in range(NUM))


@pytest.mark.parametrize("make", [numbered, numbers])
def test_two_processes_read_disjoint_rows_whose_union_is_the_epoch(make):
    parts = [
        [batch["number"] for batch in islice(read(make, batch_size=10).batches(0, rows), 3)]
        for rows in (np.arange(5), np.arange(5, 10))
    ]
    first, second = (set(np.concatenate(part).tolist()) for part in parts)
    assert not first & second
    assert first | second == set(range(NUM))


@pytest.mark.parametrize("make", [numbered, numbers])
@pytest.mark.parametrize("start", [3, 9])
def test_reading_on_in_the_middle_of_an_epoch_gives_the_same_batches(make, start):
    whole = list(islice(read(make).batches(), 12))
    for one, other in zip(whole[start:], read(make).batches(start), strict=False):
        same(one, other)


@pytest.mark.slow
def test_workers_read_what_threads_read_also_from_the_middle_on():
    """The random numbers of a transformation follow from the row, and not from the worker."""
    threads = read(own.items, transform=own.noisy)
    workers = read(own.items, transform=own.noisy, workers=2)
    expected = list(islice(threads.batches(), 8))
    for one, other in zip(expected[5:], workers.batches(5), strict=False):
        same(one, other)
    assert not np.array_equal(expected[0]["x"], read(own.items).rows(0, np.arange(4))["x"])


@pytest.mark.parametrize("make", [numbered, numbers])
def test_a_short_last_batch_is_filled_with_rows_that_do_not_count(make):
    batches = list(read(make, seed=None, batch_size=8).batches())
    assert [batch[COUNTED].tolist() for batch in batches] == [[1] * 8] * 3 + [[1] * 6 + [0] * 2]
    rows = np.concatenate([batch["number"][batch[COUNTED] > 0] for batch in batches])
    assert rows.tolist() == list(range(NUM))


WRONG = {
    "shape": "own:rows, row 17: x\n    has the shape [3], and [8] in the first row\n    crop or pad it to one shape",
    "missing": "own:rows, row 17: label\n    is missing, or no array",
    "tuple": "own:rows, row 17 is a tuple, not a mapping of names to arrays; return {'image': x, 'label': y}",
    "file": "own:rows, row 17 cannot be read: FileNotFoundError: [Errno 2] No such file or directory: 'pictures/",
}


@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_row_is_named_with_what_is_wrong(how):
    data = read(lambda: own.items(NUM, broken=17, how=how))
    with pytest.raises(DataError) as error:
        list(islice(data.batches(), 8))
    assert WRONG[how] in str(error.value)


def test_a_number_does_not_become_a_truth_value():
    with pytest.raises(DataError, match="x\n    is int64, and bool in the first row"):
        RowSpec.of({"x": True}, "own:rows, row 0").checked({"x": 2}, "own:rows, row 1")


def test_a_label_beyond_the_classes_is_named():
    source = as_source(lambda: own.columns(bad="label"), "own:rows")
    spec = RowSpec(RowSpec.of(*first_row(source)).arrays, {"label": 4})
    with pytest.raises(DataError, match=r"row 17: label\n    is 4, and the model has the 4 classes 0 to 3"):
        RowDataset(source, spec, 4, None).rows(4, np.arange(4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: 3, "returned int, which has no rows; return a Grain or Hugging Face data set"),
        (list, "own:rows has no rows"),
        (lambda: {"x": np.zeros(3), "y": np.zeros(4)}, "need the same number of rows as their first dims: x has 3, y"),
        (lambda: own.of_grain().repeat(), "repeats its rows without end: leave out repeat()"),
        (lambda: own.of_grain().filter(lambda row: False), "is None: a filtered data set has no rows by index"),
        (lambda: [{"text": "a"}], "text\n    is a str of <U1, not an array of numbers"),
        (lambda: [{"counted": 1}], "a batch has an array of this name already"),
        (lambda: iter([]), "own:rows has no rows"),
    ],
)
def test_what_has_no_rows_is_refused(make, message):
    with pytest.raises(DataError) as error:
        read(make)
    assert message in str(error.value)


def test_rows_that_cannot_be_sent_to_workers_are_refused():
    data = read(lambda: [{"x": 1}], transform=lambda row, rng: row, workers=1)
    with pytest.raises(DataError, match=r"cannot be sent to other processes.*data\.workers=0 reads with threads"):
        next(data.batches())


def test_an_iterator_that_ends_for_good_is_named():
    once = iter([{"x": 1}] * 6)
    data = StreamDataset(Stream("own:rows", lambda: once), RowSpec.of({"x": 1}, ""), 4, 0)
    with pytest.raises(DataError, match="has no rows in pass 2: return a new iterator each time"):
        list(islice(data.batches(), 2))


class HuggingFace:
    """What `datasets.Dataset` offers; the library is not needed for it."""

    features = ("x",)

    def __init__(self, form=None):
        self.form = form

    def with_format(self, form):
        return HuggingFace(form)

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return {"x": np.ones(3)} if self.form == "numpy" else {"x": "not in NumPy's format"}


def test_a_data_set_of_hugging_face_gives_arrays():
    assert read(HuggingFace).spec.arrays == {"x": ((3,), np.dtype("float32"))}
