"""Runs of models that are no decoders of meshpar's, as a plan gets them: what a config imports."""

from __future__ import annotations

from meshpar import Run
from tests.equivalence.strategies import model
from tests.zoo.gshard import Model
from tests.zoo.parts import cross_entropy
from tests.zoo.t5 import T5
from tests.zoo.vit import ViT

NAMES = {"vit": "ViT", "t5": "T5", "gshard": "Model"}
AXES: dict[str, set[str]] = {"vit": set(), "t5": set(), "gshard": {"expert"}}
"""Axes that divide the model beside those that divide every one."""
__all__ = ["AXES", "NAMES", "T5", "Model", "ViT"]


def rows_of(name: str):
    return dict(model(name)[0].batch)


def loss_of_vit(model, batch):
    return cross_entropy(model(batch["image"]), batch["label"])


def loss_of_t5(model, batch):
    return cross_entropy(model(batch["inputs"], batch["targets"]), batch["targets"])


def loss_of_gshard(model, batch):
    return cross_entropy(model(batch["tokens"])[0], batch["targets"])


def run_of(name: str) -> Run:
    """The run of a model, on one device."""
    zoo = model(name)[0]
    here = "tests.equivalence.planned"
    dims = {glob: list(names) for glob, names in zoo.dims.items()}
    return Run.model_validate(
        {
            "model": {"kind": "import", "target": f"{here}:{NAMES[name]}", "dims": dims},
            "loss": f"{here}:loss_of_{name}",
            "data": {"kind": "import", "target": f"{here}:rows_of", "arguments": {"name": name}, "batch_size": 16},
            "optim": {"kind": "adamw", "lr": 1e-3}, "num_steps": 1, "run_dir": "unused",
            "rules": {"preset": "replicated", **zoo.rules},
        }
    )  # fmt: skip
