"""Pictures from every format: the rows that Pillow gives, the same on any processes and workers; and damaged ones."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import islice
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from meshpar import ConfigError, DataError, Images, fit
from meshpar.data.images import augment
from meshpar.data.rows.spec import COUNTED
from tests import pictures
from tests.interop.encoders import computed_by, config_of, saved
from tests.tasks import runs

SIZE = (16, 16)
VARIED = {"mixup": 0.4, "cutmix": 1.0}
MEAN, STD = [0.5, 0.4, 0.3], [0.5, 0.25, 0.2]


@pytest.fixture(scope="module")
def found():
    return pictures.pictures()


@pytest.fixture(scope="module")
def written(tmp_path_factory, found):
    folder = tmp_path_factory.mktemp("pictures")
    return {name: write(folder / name, found) for name, write in pictures.WRITERS.items()}


def data(path, name="folders", **more) -> Images:
    more.setdefault("num_classes", None if name == "folders" else 3)
    return Images(path=str(path), format=name, size=SIZE, batch_size=8, **more)


def same(one, other):
    assert one.keys() == other.keys()
    for name, x in one.items():
        np.testing.assert_array_equal(x, other[name])


@pytest.mark.parametrize("name", pictures.WRITERS)
def test_rows_are_what_pillow_gives_in_each_format(written, found, name):
    config = data(written[name], name, augment=None, center=1.0, dtype="uint8", held_out_path=str(written[name]))
    held_out = config.datasets(0)[1]
    batch = held_out.rows(2, np.arange(8))
    for place, (picture, label) in enumerate(found[16:24]):
        expected = ImageOps.fit(Image.open(io.BytesIO(picture)).convert("RGB"), SIZE, Image.Resampling.BILINEAR)
        np.testing.assert_array_equal(batch["image"][place], np.asarray(expected))
        assert batch["label"][place] == label
    assert [int(one[COUNTED].sum()) for one in held_out.batches()] == [8, 8, 8, 6]


def test_normalized_rows_are_what_transformers_makes_of_a_picture(written, found):
    """Of the size that is asked for, so that neither crops."""
    processor = ViTImageProcessorPil(size={"height": 24, "width": 24}, image_mean=MEAN, image_std=STD)
    config = Images(path=str(written["folders"]), size=(24, 24), batch_size=30, augment=None, center=1.0,
                    mean=tuple(MEAN), std=tuple(STD), held_out_path=str(written["folders"]))  # fmt: skip
    rows = config.datasets(0)[1].rows(0, np.arange(30))["image"]
    same_size = [i for i in range(30) if i % 3 == i % 5 == 0]
    opened = [Image.open(io.BytesIO(found[i][0])) for i in same_size]
    want = processor(opened, return_tensors="np")["pixel_values"].transpose(0, 2, 3, 1)
    np.testing.assert_allclose(rows[same_size], want, rtol=0, atol=1e-6)
    assert np.abs(want - rows[::-1][same_size]).max() > 0.1


def test_a_jpeg_at_a_smaller_scale_is_near_to_the_whole_one():
    """Decoded at an eighth of its size: a smooth picture, so that both ways average the same."""
    ramp = np.linspace(0, 255, 512).astype(np.uint8)
    pixels = np.stack(
        [np.tile(ramp, (512, 1)), np.tile(ramp[:, None], (1, 512)), np.full((512, 512), 80, np.uint8)], -1
    )
    picture = pictures.encoded(pixels, "JPEG")
    whole = augment.CenterCrop(SIZE, 3, "uint8", 1.0)({"picture": picture, "label": 0}, np.random.default_rng(0))[
        "image"
    ]
    expected = np.asarray(Image.open(io.BytesIO(picture)).resize(SIZE, Image.Resampling.BOX))
    assert np.abs(whole.astype(int) - expected).max() <= 3


@pytest.mark.parametrize("name", pictures.WRITERS)
def test_each_picture_is_read_once_an_epoch_in_another_order(written, name):
    train, held_out = data(written[name], name, augment=None, held_out_fraction=0.2).datasets(0)
    num = train.num_rows
    assert num + held_out.num_rows == pictures.NUM
    images = np.concatenate([batch["image"] for batch in islice(train.batches(), 8)])
    epochs = [[image.tobytes() for image in images[start : start + num]] for start in (0, num)]
    assert len({*epochs[0]}) == num and {*epochs[0]} == {*epochs[1]}
    assert epochs[0] != epochs[1]
    assert not {*epochs[0]} & {image.tobytes() for batch in held_out.batches() for image in batch["image"]}


@pytest.mark.parametrize("name", ["folders", pytest.param("parquet", marks=pytest.mark.slow)])
def test_workers_and_processes_read_the_same_rows_also_from_the_middle_of_an_epoch_on(written, name):
    """Cropped, mirrored and mixed: the random numbers follow from the row."""
    train = data(written[name], name, augment=VARIED).datasets(3)[0]
    workers = data(written[name], name, augment=VARIED, workers=1 if name == "folders" else 2).datasets(3)[0]
    whole = list(islice(train.batches(), 7))
    for one, other in zip(whole[2:], workers.batches(2), strict=False):
        same(one, other)
    halves = [islice(train.batches(2, rows), 5) for rows in (np.arange(3), np.arange(3, 8))]
    for one, first, second in zip(whole[2:], *halves, strict=True):
        same(one, {key: np.concatenate([first[key], second[key]]) for key in one})


def test_random_numbers_of_a_worker_would_be_found(written):
    """The control of the test above."""
    train = data(written["folders"]).datasets(3)[0]
    expected = train.rows(2, np.arange(8))
    right, own = train.transform, np.random.default_rng()
    with pytest.raises(AssertionError):
        same(expected, replace(train, transform=lambda row, draw: right(row, own)).rows(2, np.arange(8)))


def test_mixed_labels_are_weights_of_the_classes_and_mix_no_held_out_picture(written):
    train = data(written["folders"], augment={**VARIED, "crop_area": (1, 1), "flip": 0}).datasets(0)[0]
    batches = list(islice(train.batches(), 6))
    labels = np.concatenate([batch["label"] for batch in batches])
    np.testing.assert_allclose(labels.sum(-1), 1, atol=1e-6)
    assert ((labels > 0).sum(-1) == 2).any()
    varied = train.transform
    assert {*varied.chosen} == {*train.chosen} and len(train.chosen) < pictures.NUM


def test_a_pasted_rectangle_has_the_weight_of_its_pixels():
    draw = np.random.default_rng(0)
    for kept in (0.1, 0.5, 0.97):
        image, part = augment._pasted(np.zeros((20, 30, 3), np.uint8), np.ones((20, 30, 3), np.uint8), kept, draw)
        assert part == pytest.approx(1 - image.mean())
        assert part == pytest.approx(kept, abs=0.06)


def test_crops_are_of_the_area_and_proportions_that_the_config_says():
    draw = np.random.default_rng(0)
    for _ in range(200):
        x, y, right, lower = augment.random_part((400, 200), (0.2, 0.5), (0.5, 2), (10, 20), draw)
        assert 0 <= x < right <= 400 and 0 <= y < lower <= 200
        assert 0.2 <= (right - x) * (lower - y) / 80000 <= 0.5
        assert 1 <= (right - x) / (lower - y) <= 4


# Damaged pictures and files -------------------------------------------------------------------------------------------

BOMB = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x01\x86\xa0\x00\x01\x86\xa0\x08\x02\x00\x00\x00"
WRONG = {
    "cut off": (lambda picture: picture[:-200], "it cannot be decoded: OSError: image file is truncated"),
    "no picture": (lambda picture: b"%!PS-Adobe", "it cannot be decoded: it is none of JPEG, PNG, WEBP"),
    "a bomb": (lambda picture: _bomb(), "it claims more than 89,478,485 pixels, the limit of Pillow"),
    "deep": (lambda picture: _deep(), "it has numbers of more than 8 bits (Pillow's mode I;16)"),
    "empty": (lambda picture: b"", "it cannot be decoded: it is none of"),
}


def _bomb() -> bytes:
    import zlib

    header = BOMB + zlib.crc32(BOMB[12:]).to_bytes(4, "big")
    return header + b"\x00\x00\x00\x00IDAT" + zlib.crc32(b"IDAT").to_bytes(4, "big")


def _deep() -> bytes:
    return pictures.encoded(np.zeros((8, 8), np.uint16))


@pytest.fixture
def damaged(tmp_path, found):
    """Writes the pictures, of which number 7 is damaged in some way."""

    def write(how: str, name: str = "folders") -> Path:
        rows = list(found)
        rows[7] = (WRONG[how][0](rows[7][0]), rows[7][1])
        return pictures.WRITERS[name](tmp_path / "pictures", rows)

    return write


@pytest.mark.parametrize("how", WRONG)
def test_a_corrupt_picture_is_an_error_that_names_it(damaged, how):
    path = damaged(how)
    train = data(path, held_out_path=str(path)).datasets(0)[0]
    with pytest.raises(DataError) as error:
        list(islice(train.batches(), 5))
    first, what, fix = str(error.value).split("\n")
    assert first == f"{path}/bars/007.png"
    assert WRONG[how][1] in what
    assert fix.strip() == "replace or remove it, or data.skip_corrupt=true"


FILES = {"parquet": "0.parquet, row 7", "webdataset": "0.tar, row 7", "array_record": "0.array_record, row 7"}


@pytest.mark.parametrize("name", FILES)
def test_a_corrupt_picture_in_a_file_is_named_by_file_and_row(damaged, name):
    path = damaged("cut off", name)
    train = data(path, name, held_out_path=str(path)).datasets(0)[0]
    with pytest.raises(DataError, match=f"{path}/{FILES[name]}\n    it cannot be decoded"):
        list(islice(train.batches(), 5))


def test_skipped_pictures_do_not_count_are_named_once_and_counted(damaged, capsys):
    path = damaged("cut off")
    config = data(path, held_out_path=str(path), skip_corrupt=True, augment=None)
    train, held_out = config.datasets(0)
    batches = list(islice(train.batches(), 15))  # four epochs
    assert sum(batch[COUNTED].sum() for batch in batches) == 120 - 4 and train.skipped.count == 4
    for batch in batches:
        assert not batch["image"][batch[COUNTED] == 0].any()
    assert sum(batch[COUNTED].sum() for batch in held_out.batches()) == pictures.NUM - 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2  # of the training, and of the evaluation
    assert said[0].startswith(f"meshpar: skips a corrupt row: {path}/bars/007.png: it cannot be decoded")


def test_a_picture_that_is_mixed_with_a_corrupt_one_names_the_other(damaged):
    train = data(damaged("cut off"), augment=VARIED).datasets(0)[0]
    with pytest.raises(DataError, match=r"the other picture, .*007.png: it cannot be decoded"):
        list(islice(train.batches(), 30))


def test_a_missing_picture_is_named(damaged):
    path = damaged("cut off")
    train = data(path, held_out_path=str(path), skip_corrupt=True).datasets(0)[0]
    (path / "dots" / "011.png").unlink()
    with pytest.raises(DataError, match=r"dots/011.png: it cannot be read: No such file"):
        list(islice(train.batches(), 5))


CUT = {
    "parquet": ("0.parquet", "is no whole Parquet file (Parquet magic bytes not found in footer"),
    "webdataset": ("0.tar", "does not end as a tar file does: it was cut off, or is of another format"),
    "array_record": ("0.array_record", "is no whole ArrayRecord file"),
}


@pytest.mark.parametrize("keep", [0.3, 0.97])
@pytest.mark.parametrize("name", CUT)
def test_a_file_that_ends_in_the_middle_of_a_record_is_named(tmp_path, found, name, keep):
    file, what = CUT[name]
    path = pictures.WRITERS[name](tmp_path / "cut", found) / file
    whole = path.read_bytes()
    whole = whole.rstrip(b"\0") if name == "webdataset" else whole
    path.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(DataError) as error:
        data(path.parent, name).datasets(0)
    assert str(path) in str(error.value)
    assert what in str(error.value) or "is no whole tar file" in str(error.value)
    assert "copy it again from where it came from" in str(error.value)


def test_a_label_beyond_the_classes_is_named_with_file_row_and_fix(written):
    path = written["webdataset"]
    train = data(path, "webdataset", num_classes=2, held_out_path=str(path)).datasets(0)[0]
    with pytest.raises(DataError) as error:
        list(islice(train.batches(), 5))
    assert ".tar, row " in str(error.value)
    assert "its label is 2, and the classes are 0 to 1\n    data.num_classes=3" in str(error.value)


REFUSED = {
    "no folder": ({"path": "nowhere"}, "data.path = 'nowhere'\n    there is no such folder"),
    "no held-out folder": ({"held_out_path": "nowere"}, "data.held_out_path = 'nowere'\n    there is no such folder"),
    "no held-out file": ({"format": "parquet", "held_out_path": "neer.parquet"}, "did you mean near.parquet?"),
    "no class folders": ({"path": "."}, "contains no folder\n    a folder for each class; or data.format=parquet"),
    "a column": ({"format": "parquet", "image_field": "picture"}, "has no column 'picture'\n    It has image, label"),
    "of text": (
        {"format": "parquet", "label_field": "image"},
        "its column 'image' is binary, not integers\n    data.label_field names",
    ),
    "a suffix": ({"format": "webdataset", "label_field": "txt"}, "'a/000' has a picture only, as 17 of 17 rows"),
    "a feature": ({"format": "array_record", "label_field": "cls"}, "no feature 'cls'\n    data.label_field is one of"),
    "held out twice": ({"held_out_path": "a", "held_out_fraction": 0.1}, "leave one of them out"),
    "folders": ({"num_classes": 3, "glob": "*"}, "glob, num_classes: of files with labels"),
    "mixing": ({"format": "parquet", "augment": {"mixup": 1.0}}, "which needs num_classes"),
    "a mean of gray": ({"channels": 1, "mean": [0.5, 0.5, 0.5]}, "mean: has 3 numbers for 1 channels"),
    "a deviation of bytes": ({"dtype": "uint8", "std": [1, 1, 1]}, "std: of numbers from 0 to 1"),
    "no deviation": ({"std": [1, 0, 1]}, "greater than 0"),
    "area": ({"augment": {"crop_area": [0.5, 1.5]}}, "1.5 is more than the whole picture"),
    "ratio": ({"augment": {"crop_ratio": [2, 1]}}, "[2.0, 1.0] are no bounds"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(written, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path("near.parquet").touch()
    changes, message = REFUSED[name]
    where = str(written[changes.get("format", "folders")])
    with pytest.raises((ConfigError, DataError)) as error:
        next(Images.model_validate({"path": where, "size": SIZE} | changes).datasets(0)[0].batches())
    assert message in str(error.value)


def test_without_pillow_the_extra_is_named(written, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(DataError, match=r"needs Pillow, which is not installed: pip install 'meshpar\[images\]'"):
        data(written["folders"]).datasets(0)


# Runs -----------------------------------------------------------------------------------------------------------------


def pixels(path, **changes):
    base = {
        "kind": "images",
        "path": str(path),
        "size": SIZE,
        "batch_size": 8,
        "target": None,
        "held_out_fraction": 0.2,
    }
    of_data = {key: value for key, value in (base | changes.pop("data", {})).items() if key != "target"}
    model = changes.pop("model", {"kind": "import", "target": "tests.tasks.own:Pixels"})
    mapping = runs.mapping(changes.pop("run_dir"), **changes) | {"model": model}
    return runs.of(mapping | {"data": of_data, "mesh": {"data": 2, "fsdp": 4}, "rules": ["fsdp"]})


@pytest.mark.slow
def test_a_run_resumes_in_the_middle_of_an_epoch_to_the_bit_with_workers(written, tmp_path):
    varied = {"augment": VARIED}
    whole = fit(pixels(written["folders"], run_dir=tmp_path / "whole", num_steps=5, data=varied), json=True)
    fit(pixels(written["folders"], run_dir=tmp_path / "run", num_steps=2, data=varied), json=True)
    resumed = pixels(written["folders"], run_dir=tmp_path / "run", num_steps=5, data=varied | {"workers": 1})
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(fit(resumed, json=True)), strict=True):
        np.testing.assert_array_equal(jax.device_get(one), jax.device_get(other))


def test_a_run_records_how_many_rows_it_skipped(damaged, tmp_path):
    path = damaged("cut off")
    fit(
        pixels(path, run_dir=tmp_path, num_steps=8, log_every=8, data={"skip_corrupt": True, "augment": None}),
        json=True,
    )
    train = runs.records(tmp_path, "train")
    assert train[-1]["rows_skipped"] in (2, 3) and train[0]["rows_skipped"] in (0, 1)


def test_a_pretrained_vit_begins_with_the_loss_of_transformers(written, tmp_path):
    """Pictures of folders, normalized, on data 2 x fsdp 4."""
    reference = saved("vit", "classify", tmp_path / "vit", image_size=16, num_labels=3, num_hidden_layers=1)
    given = {"augment": None, "mean": MEAN, "std": STD}
    run = pixels(
        written["folders"], run_dir=tmp_path / "run", num_steps=1, data=given,
        init={"from_hf": str(tmp_path / "vit")}, model={"kind": "encoder", "config": config_of(tmp_path / "vit")},
    )  # fmt: skip
    with jax.numpy_dtype_promotion("standard"):
        fit(run, json=True)
    batch = run.data.datasets(run.seed)[0].rows(0, np.arange(8))
    labels = torch.tensor(batch["label"], dtype=torch.long)
    want = torch.nn.functional.cross_entropy(torch.tensor(computed_by(reference, batch)["logits"]), labels)
    assert runs.records(tmp_path / "run", "train")[0]["loss"] == pytest.approx(float(want), abs=1e-5)
