"""The errors of settings of the training: the literal text, exit code 2, and nothing written."""

from __future__ import annotations

import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from meshpar.checkpoint.checkpoints import CheckpointMetadata, checkpoints
from tests.errors.test_messages import EXTRA, meshpar  # noqa: F401  a fixture

TEACHER = "distill={teacher: teacher}"
REFUSED = {
    "settings out of their bounds": (
        ["loss.label_smoothing=1", "loss.z_loss=-1", "optim.ema=1.0"],
        """\
meshpar: 3 problems in config.yaml:
  loss.label_smoothing (command line)
    must be less than 1.0, got 1
  loss.z_loss (command line)
    must be at least 0.0, got -1
  optim.ema (command line)
    must be less than 1.0, got 1.0
""",
    ),
    "no number of tokens": (
        ["loss.chunk=0"],
        """\
meshpar: 1 problem in config.yaml:
  loss.chunk (command line)
    must be auto, none, or a number of tokens, got 0
""",
    ),
    "chunks of a loss of one's own": (
        ["loss={target: mine:loss, chunk: 8}"],
        """\
meshpar: 1 problem in config.yaml:
  loss (command line)
    label_smoothing, z_loss and chunk: in a target, pass them to meshpar.cross_entropy
""",
    ),
    "globs that match nothing, and steps that never come": (
        [EXTRA, "freeze=[block.**, {paths: [head], until: 2}]"],
        """\
meshpar: freeze does not fit the model:
  freeze.0.paths
    no parameter matches 'block.**'
    `meshpar explain` lists them
  freeze.1.until
    2 is not below num_steps = 2: the parameters would never be trained
    leave it out to freeze them for the whole run
""",
    ),
    "layers that are none, or too many": (
        [EXTRA, "freeze=[{layers: '7:'}, {layers: ':'}, {layers: '0:1', paths: head}, {layers: '0:1', until: 1}]"],
        """\
meshpar: freeze does not fit the model:
  freeze.0.layers
    '7:' are none of the 2 layers of blocks.attn.k.kernel
    other layers; or leave layers out to freeze all
  freeze.1.layers
    ':' are all of the 2 layers of blocks.attn.k.kernel
    other layers; or leave layers out to freeze all
  freeze.2.paths
    no parameter that matches 'head' has a dim `layers`, which stacks layers
    name the layer in the path: layers.0.**
  freeze.3.until
    layers are frozen for the whole run
    leave out until, or layers
""",
    ),
    "layers that are no slice": (
        [EXTRA, "freeze=[{layers: 0-7}]"],
        """\
meshpar: 1 problem in config.yaml:
  freeze.0.layers (command line)
    must be a slice, such as 0:8, 8: or :-4
""",
    ),
    "everything is frozen": (
        [EXTRA, "freeze=['**']"],
        """\
meshpar: freeze does not fit the model:
  freeze
    every parameter is frozen for the whole run
    leave at least one to train
""",
    ),
    "a key in a list": (
        ["loggers=[tensorboard, {kind: wandb, projct: mine}]", "freeze=[{path: head}]"],
        """\
meshpar: 3 problems in config.yaml:
  freeze.0.paths (command line)
    required, but missing
  freeze.0.path (command line)
    unknown key
    did you mean freeze.0.paths?
  loggers.1.projct (command line)
    unknown key
    did you mean loggers.1.project?
""",
    ),
    "a logger that there is not": (
        ["loggers=[tensorbord]"],
        """\
meshpar: 1 problem in config.yaml:
  loggers.0 (command line)
    no kind is called 'tensorbord'
    did you mean tensorboard? There are tensorboard, wandb, mlflow, prometheus
""",
    ),
    "early stopping without evaluations": (
        ["early_stopping={patience: 2}"],
        """\
meshpar: 1 problem in config.yaml:
  the file
    early_stopping needs evaluations: set eval_every, the steps between them
""",
    ),
    "a teacher that is not there": (
        [EXTRA, "distill={teacher: nowhere}"],
        "meshpar: FOLDER/nowhere does not exist\n",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_mistake_is_reported_and_ends_with_2(meshpar, mistake):  # noqa: F811
    overrides, text = REFUSED[mistake]
    assert meshpar("explain", *overrides) == (2, "", text.replace("FOLDER", str(Path.cwd())))
    assert not Path("nowhere").exists()


def teacher(**changes) -> None:
    """Writes the folder of a run, with a checkpoint of its config and its step."""
    sizes = {"num_layers": 1, "hidden_size": 16, "num_heads": 4, "intermediate_size": 32, "vocab_size": 64}
    model = changes if "kind" in changes else {"kind": "llama"} | sizes | changes
    data = {"kind": "synthetic", "vocab_size": 64}
    config = {
        "model": model,
        "data": data,
        "optim": {"kind": "adamw", "lr": 1e-3},
        "num_steps": 1,
        "run_dir": "teacher",
    }
    with checkpoints(Path("teacher/checkpoints"), about=CheckpointMetadata(config=config)) as saved:
        saved.save(1, {"step": jnp.int32(1)})


def test_a_teacher_with_another_vocabulary_is_refused(meshpar):  # noqa: F811
    teacher(pad_vocab_to_multiple=48)
    message = "distill: the teacher in teacher has 64 token ids in 96 rows of its vocabulary, this model 64 in 64"
    assert meshpar("explain", EXTRA, TEACHER) == (2, "", f"meshpar: {message}\n")


def test_a_teacher_that_is_no_decoder_of_meshpar_is_refused(meshpar):  # noqa: F811
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    teacher(kind="family", config={"model_type": "gemma", "vocab_size": 64, "head_dim": 4, **sizes})
    what = "a model of kind family computes its loss itself; a teacher and its student must be of kind llama or gpt"
    message = f"meshpar: distill: the teacher in teacher does not fit:\n{what}\n"
    assert meshpar("explain", EXTRA, TEACHER) == (2, "", message)


def test_a_teacher_that_does_not_fit_the_mesh_is_refused(meshpar):  # noqa: F811
    teacher(intermediate_size=33)
    code, _, message = meshpar("explain", EXTRA, TEACHER)
    assert code == 2
    heading = (
        "meshpar: distill: the teacher in teacher does not fit:\n3 arrays do not fit mesh (data=2, fsdp=2, tensor=2):\n"
    )
    assert message.startswith(heading)


def test_a_teacher_with_a_changed_config_is_refused(meshpar):  # noqa: F811
    teacher()
    meta = Path("teacher/checkpoints/1/meta.json")
    meta.write_text(meta.read_text().replace("llama", "gpt"))
    code, _, message = meshpar("explain", EXTRA, TEACHER)
    assert (code, "does not match its checksum" in message) == (2, True)


def test_a_missing_package_is_reported_before_anything_is_compiled(meshpar, monkeypatch):  # noqa: F811
    monkeypatch.setitem(sys.modules, "wandb", None)
    code, _, message = meshpar("train", EXTRA, "loggers=[wandb]")
    assert (code, message.partition(":")[0]) == (2, "meshpar")
    assert "pip install 'meshpar[wandb]', or leave it out\n" in message
