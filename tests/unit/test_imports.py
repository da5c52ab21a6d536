"""A model of the user's own from a config: all verbs serve it, and no config imports what nobody meant."""

from __future__ import annotations

import json
import sys

import jax
import pytest

from meshpar import imports

MODULE = """
import flax.linen as nn
import jax.numpy as jnp
import optax
from flax import nnx


class Own(nn.Module):
    width: int = 16
    batch_norm: bool = False

    @nn.compact
    def __call__(self, tokens):
        init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        x = nn.Embed(64, self.width)(tokens)
        x = nn.Dense(32, kernel_init=init)(x)
        if self.batch_norm:
            x = nn.BatchNorm(use_running_average=not self.is_mutable_collection("batch_stats"))(x)
        return nn.Dense(64)(nn.gelu(x))


class OwnNNX(nnx.Module):
    def __init__(self, width, rngs):
        self.table = nnx.Embed(64, width, param_dtype=jnp.result_type(float), rngs=rngs)
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        self.up = nnx.Linear(width, 64, kernel_init=init, rngs=rngs)

    def __call__(self, tokens):
        return self.up(self.table(tokens))


def loss(model, params, batch, key):
    logits = model.apply({"params": params}, batch["tokens"])
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(batch["targets"], 0))
    return nll.mean(), {"largest": logits.max()}


def normed(model, params, batch, key, carried):
    variables = {"params": params, **carried}
    logits, carried = model.apply(variables, batch["tokens"], mutable=["batch_stats"])
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(batch["targets"], 0))
    return nll.mean(), {}, carried


def number():
    return 7
"""
CONFIG = """\
model: {kind: import, target: own_model:Own}
data: {kind: synthetic, vocab_size: 64, batch_size: 8, seq_len: 8}
optim: {kind: adamw, lr: 1e-2}
mesh: {data: 2, fsdp: 2, tensor: 2}
rules: {preset: [fsdp, megatron], unnamed: []}
lowering: auto
num_steps: 2
log_every: 1
run_dir: run
"""


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
    """A folder with a module and a config; nothing was permitted before."""
    monkeypatch.setattr(imports, "_named", [])
    monkeypatch.setattr(imports, "_permitted", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    here = tmp_path / "here"
    here.mkdir()
    (here / "own_model.py").write_text(MODULE)
    (here / "config.yaml").write_text(CONFIG)
    monkeypatch.chdir(here)
    with jax.numpy_dtype_promotion("standard"):
        yield
    sys.modules.pop("own_model", None)


@pytest.fixture
def meshpar(command):
    """Runs a command; gives its exit code, and what it printed."""

    def call(*arguments: str) -> tuple[int, str]:
        said = command(*arguments)
        return said.code, said.err or said.out

    return call


def records(told, kind):
    return [r for r in map(json.loads, told.splitlines()) if r["kind"] == kind]


def test_a_linen_model_trains_and_goes_on(meshpar):
    code, told = meshpar("train", "config.yaml", "--json")
    assert code == 0
    assert [r["step"] for r in records(told, "train")] == [1, 2]
    code, told = meshpar("train", "config.yaml", "num_steps=3", "mesh.data=4", "mesh.tensor=1", "--json")
    assert [r["step"] for r in records(told, "train")] == [3]


def test_its_own_loss_reports_metrics(meshpar):
    _, told = meshpar("train", "config.yaml", "loss=own_model:loss", "--json")
    assert all(r["largest"] > 0 for r in records(told, "train") + records(told, "evaluation"))


def test_batch_statistics_are_carried(meshpar):
    batch_norm = ["model.arguments={batch_norm: true}", "loss=own_model:normed"]
    assert meshpar("train", "config.yaml", *batch_norm, "--json")[0] == 0
    code, told = meshpar("explain", "config.yaml", batch_norm[0])
    assert code == 2
    assert told == (
        "meshpar: own_model:Own has collections that change: batch_stats; "
        "it needs a loss of its own, loss: package.module:name\n"
    )


def test_an_nnx_model_is_explained_inspected_and_proved(meshpar):
    of_nnx = ["model.target=own_model:OwnNNX", "model.arguments={width: 16}"]
    assert "up.kernel" in meshpar("explain", "config.yaml", *of_nnx)[1]
    assert json.loads(meshpar("inspect", "config.yaml", *of_nnx, "--json")[1])["flops"] > 0
    code, told = meshpar("prove", "config.yaml", *of_nnx)
    assert (code, told.splitlines()[-1]) == (0, "equal to one device: no difference is above 1e-10")


# Who may import what -----------------------------------------------------------------------------------------------


def test_a_config_from_elsewhere_imports_nothing(meshpar, tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    code, told = meshpar("explain", "../config.yaml")
    assert code == 2
    assert told == (
        "meshpar: own_model:Own: ../config.yaml lies outside of the working directory, and may not have own_model.py "
        "imported; if that is meant, say meshpar --import own_model.py\n"
    )
    assert "own_model" not in sys.modules


@pytest.mark.parametrize("meant", [["--import", "own_model.py", "explain"], ["explain"]])
def test_the_command_line_may_name_it(meshpar, tmp_path, meant):
    (tmp_path / "config.yaml").write_text(CONFIG)
    named = [] if len(meant) > 1 else ["model.target=own_model:Own"]
    assert meshpar(*meant, "../config.yaml", *named)[0] == 0


def test_a_module_elsewhere_has_to_be_named(meshpar, tmp_path):
    (tmp_path / "here" / "own_model.py").rename(tmp_path / "own_model.py")
    code, told = meshpar("explain", "config.yaml")
    assert (code, told.startswith("meshpar: own_model:Own: there is no own_model.py in the working")) == (2, True)
    assert meshpar("--import", "../own_model.py", "explain", "config.yaml")[0] == 0


def test_a_link_out_of_the_working_directory_is_not_followed(meshpar, tmp_path):
    (tmp_path / "here" / "own_model.py").rename(tmp_path / "there.py")
    (tmp_path / "here" / "own_model.py").symlink_to(tmp_path / "there.py")
    assert meshpar("explain", "config.yaml")[0] == 2


def test_a_config_that_was_not_read_from_a_file_imports_nothing():
    with pytest.raises(Exception, match="was not permitted"):
        imports.load("own_model:Own")


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ("model.target=own_model:Onw", "own_model:Onw: {here}/own_model.py has no Onw; did you mean Own?"),
        (
            "model.target=own_model:number",
            "own_model:number gives int, which is no Linen module, and takes no rngs, as NNX's do; "
            "give a function that makes a Flax model",
        ),
        ("model.target=decimal:Own", "decimal:Own: there is no decimal.py in the working directory, {here}"),
        ("data.vocab_size=70", "the data has 70 token ids, the logits of own_model:Own are of 64"),
    ],
)
def test_what_does_not_fit(meshpar, tmp_path, changed, told):
    assert meshpar("explain", "config.yaml", changed) == (2, f"meshpar: {told.format(here=tmp_path / 'here')}\n")


def test_the_manual_lowering_is_for_meshpars_own(meshpar):
    code, told = meshpar("explain", "config.yaml", "lowering=manual")
    assert code == 2
    assert told.endswith("lowering\n    a model that is imported is lowered by GSPMD\n    lowering=auto\n")


def test_a_module_that_fails_says_where(meshpar, tmp_path):
    (tmp_path / "here" / "own_model.py").write_text("x = 1\ny = x / 0\n")
    code, told = meshpar("explain", "config.yaml")
    assert code == 2
    where = tmp_path / "here" / "own_model.py"
    assert told == f"meshpar: {where} cannot be imported: ZeroDivisionError: division by zero (line 2)\n"


def test_a_module_cannot_take_the_name_of_an_installed_one(meshpar, tmp_path):
    (tmp_path / "here" / "decimal.py").write_text(MODULE)
    code, told = meshpar("explain", "config.yaml", "model.target=decimal:Own")
    assert (code, told.endswith("an installed module has the name decimal too; choose another\n")) == (2, True)
