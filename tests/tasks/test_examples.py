"""The examples of `configs/examples`: each learns what it is for, and is the same on three meshes as on one device."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import jax
import pytest

from meshpar import Images, Run, convert, fit
from meshpar.experiment.config import load
from meshpar.interop.encoder_model import EncoderModel
from tests.tasks import runs

FOLDER = Path(__file__).parents[2] / "configs" / "examples"
DECODERS = {"prefer_polite", "prefer_polite_orpo", "grow_polite", "grow_polite_start"}
"""Train one of meshpar's models: `test_preferences.py`, `test_grpo.py`."""
STARTS_FROM = {"sentence_pairs": "masked_tokens", "reviews": "reviews_words"}
"""Example -> the one that is trained before it, from whose checkpoint or folder it starts."""
EXAMPLES = sorted({path.stem for path in FOLDER.glob("*.yaml")} - DECODERS - {"reviews_words"})
LEARNED = {
    "digits_vit": ("accuracy", 0.93), "digits_resnet": ("accuracy", 0.93), "masked_tokens": ("accuracy", 0.8),
    "clip_pairs": ("recall_at_1", 0.8), "house_prices": ("r2", 0.98), "time_series": ("r2", 0.95),
    "digits_diffusion": ("r2", 0.8), "recommender": ("auc", 0.75), "sentence_pairs": ("accuracy", 0.79),
    "reviews": ("accuracy", 0.88), "digits_pictures": ("accuracy", 0.83),
}  # fmt: skip
"""Metric -> the least value that a trained example must have."""
MESHES = {
    "data": ({"data": 8}, ["zero1"]),
    "fsdp": ({"data": 4, "fsdp": 2}, ["fsdp"]),
    "tensor": ({"data": 2, "fsdp": 2, "tensor": 2}, ["fsdp", "megatron"]),
}
SMALL = {
    "digits_vit": {"layers": 1, "width": 16},
    "time_series": {"layers": 1, "width": 16},
    "digits_diffusion": {"width": 8},
}


@pytest.fixture
def here(monkeypatch, tmp_path):
    """Returns the changes to an example with which it reads nothing of this folder but its module."""
    monkeypatch.chdir(FOLDER)
    pictures = tmp_path / "digits"

    def changed(example: str) -> list[str]:
        if example == "reviews":
            config = json.dumps(load("reviews_words.yaml").model.config)
            return ["init=null", "model.kind=encoder", f"model.config={config}"]
        if example == "digits_pictures":
            runpy.run_path("digits_pictures.py")["write"](pictures)
            return [f"data.path={pictures}/train", f"data.held_out_path={pictures}/held_out"]
        return ["init=null"]

    return changed


def test_each_example_has_a_figure_that_it_must_reach():
    assert {*LEARNED} == {*EXAMPLES} == {path.stem for path in FOLDER.glob("*.py")} - DECODERS


def placed(run, example, folder, mesh, preset, dtype) -> Run:
    """An example with small batches on a mesh."""
    model, rules = run.model, {"preset": preset}
    if not isinstance(model, EncoderModel):
        model = model.model_copy(update={"arguments": model.arguments | SMALL.get(example, {})})
        rules["unnamed"] = []
    unvaried = "augment" if isinstance(run.data, Images) else "transform"
    data = run.data.model_copy(update={unvaried: None, "batch_size": 16})
    changes = {"precision": {"params": dtype, "compute": dtype}, "run_dir": folder, "mesh": mesh, "rules": rules}
    if dtype == "float32":  # Adam would divide the rounding of tiny gradients by their size
        changes["optim"] = {"kind": "sgd", "lr": 0.05}
    return Run.model_validate({**dict(run), "model": model, "data": data, **changes})


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_equal_to_one_device(here, tmp_path, float64, example, mesh):
    # Flax stores statistics of batches in float32, in which a rectifier at zero takes either side.
    has_statistics = example == "digits_resnet"
    dtype, atol, num_steps = ("float32", 1e-4, 1) if has_statistics else ("float64", 1e-10, 2)
    run = load(f"{example}.yaml", here(example))
    with jax.enable_x64(not has_statistics), jax.numpy_dtype_promotion("standard"):
        expected, found = (
            runs.after_steps(placed(run, example, tmp_path, *layout, dtype), num_devices, num_steps)
            for layout, num_devices in ((runs.ONE, 1), (MESHES[mesh], 8))
        )
    runs.assert_close(expected, found, atol)


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_learns(here, tmp_path, example):
    (name, least), changes = LEARNED[example], here(example)
    if start := STARTS_FROM.get(example):
        train(start, tmp_path / "start")
        train(example, tmp_path / "scratch", *changes)
        assert runs.records(tmp_path / "scratch", "evaluation")[-1][name] < least
        changes = [f"init.from_checkpoint={tmp_path / 'start'}"]
    if example == "reviews":
        with jax.numpy_dtype_promotion("standard"):
            convert.to_hf(tmp_path / "start", tmp_path / "bert")
        changes = [f"init.from_hf={tmp_path / 'bert'}"]
    train(example, tmp_path, *changes)
    assert runs.records(tmp_path, "evaluation")[-1][name] >= least


def train(example, folder, *changes):
    with jax.numpy_dtype_promotion("standard"):
        fit(load(f"{example}.yaml", [f"run_dir={folder}", *changes]), json=True)
