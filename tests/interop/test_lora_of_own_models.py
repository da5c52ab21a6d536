"""The low-rank updates of a user's own model are in everything that reads its run, and a new process finds its code."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pytest
from jax import export as jax_export
from safetensors.numpy import load_file

from meshpar import convert, generate
from meshpar.errors import ConfigError
from meshpar.export import onnx_graph
from meshpar.export.forward import Exportable
from meshpar.interop import user_code
from meshpar.interop.adapters import Adapters
from meshpar.serve.source import open_source
from meshpar.train.program import on_host, structs
from meshpar.tree import flatten_with_paths
from tests.command import exit_code

MODULE = """
import flax.linen as nn
import jax.numpy as jnp


class Own(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        def kernel(*dims):
            return nn.with_logical_partitioning(nn.initializers.lecun_normal(), dims)

        x = nn.Embed(64, 16)(tokens)
        x = nn.Dense(32, kernel_init=kernel("embed", "mlp"), name="up")(x)
        x = nn.DenseGeneral((4, 4), kernel_init=kernel("mlp", "embed", "head_dim"), name="heads")(nn.gelu(x))
        return nn.DenseGeneral(64, axis=(-2, -1), name="out")(x)
"""
CONFIG = """\
model: {kind: import, target: own_model:Own}
data: {kind: synthetic, vocab_size: 64, batch_size: 8, seq_len: 8, documents_in_row: joined}
optim: {kind: adamw, lr: 1e-1}
mesh: {data: 2, fsdp: 2, tensor: 2}
rules: {preset: [fsdp, megatron], unnamed: []}
num_steps: 3
loggers: []
run_dir: base
"""
ADAPTED = "init: {from_checkpoint: base}\nlora: {rank: 2, paths: [up, heads]}\nrun_dir: run\n"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """Works in a folder with a run, and one that tunes it with LoRA."""
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        patch.setattr(user_code, "_named", [])
        patch.setattr(user_code, "_permitted", {})
        patch.setattr(sys, "path", list(sys.path))
        patch.chdir(tmp_path_factory.mktemp("tuned"))
        Path("own_model.py").write_text(MODULE)
        Path("base.yaml").write_text(CONFIG)
        Path("config.yaml").write_text(CONFIG.replace("run_dir: base\n", ADAPTED))
        for config in ("base.yaml", "config.yaml"):
            assert exit_code("train", config, "--json") == 0
        yield
    sys.modules.pop("own_model", None)


def answer_of(params) -> list[int]:
    """A greedy loop in plain Flax."""
    row = [3, 5]
    for _ in range(4):
        row.append(
            int(importlib.import_module("own_model").Own().apply({"params": params}, jnp.array([row]))[0, -1].argmax())
        )
    return row[2:]


def by_hand() -> dict:
    """The kernels with their updates, alpha / rank = 8 times the product of the two matrices."""
    _, prepared, nested, _ = convert._restored(Path("run"))
    assert prepared.merged
    plain = {name: dict(child) for name, child in nested.items()}
    for module in ("up", "heads"):
        update = plain[module].pop("lora")["kernel"]
        a, b = update["a"], update["b"].reshape(2, -1)
        kernel = plain[module]["kernel"]
        plain[module]["kernel"] = kernel + 8 * (a.reshape(-1, 2) @ b).reshape(kernel.shape)
    return plain


def served():
    """The parameters that a server has."""
    source = open_source(Path("run"))
    assert source.own
    return on_host(source.own.restore(structs(source.own.decoding(2, 8, 4).params)))


def test_generation_servers_and_conversions_have_the_updates(tuned):
    want = by_hand()
    _, converted, _ = convert.trained(Path("run"))
    before = convert.trained(Path("base"))[1]
    for found in (converted, flatten_with_paths(served())):
        assert found.keys() == before.keys() == flatten_with_paths(want).keys()
        assert all(abs(found[path] - x).max() < 1e-5 for path, x in flatten_with_paths(want).items())
    assert all(abs(converted[f"{name}.kernel"] - before[f"{name}.kernel"]).max() > 0.1 for name in ("up", "heads"))
    assert generate("run", [[3, 5]], max_tokens=4).completions[0].tokens == answer_of(want)


def test_planted_updates_that_are_dropped_are_seen(tuned, monkeypatch):
    def dropped(self, params):
        return {path: x for path, x in flatten_with_paths(params).items() if ".lora." not in path}

    want = flatten_with_paths(by_hand())
    monkeypatch.setattr(Adapters, "merged_by_path", dropped)
    for found in (convert.trained(Path("run"))[1], flatten_with_paths(served())):
        assert {path for path, x in want.items() if abs(found[path] - x).max() > 0.1} == {"up.kernel", "heads.kernel"}


def test_the_directory_of_a_run_imports_no_code_that_is_not_permitted(tuned, command, monkeypatch):
    monkeypatch.setattr(user_code, "_permitted", {})
    done = command("generate", "run", "--prompt", "3 5")
    assert (done.code, done.err) == (
        2,
        "meshpar: own_model:Own: run may not import it: it is not in the working directory, where own_model is; "
        "if you trust it, run meshpar --import own_model.py\n",
    )


@pytest.mark.slow
@pytest.mark.parametrize("words", [["generate", "config.yaml"], ["--import", "own_model.py", "generate", "run"]])
def test_a_new_process_generates_from_the_config_and_from_the_directory(tuned, words):
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "meshpar", *words, "--prompt", "3 5", "--max-tokens", "4"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "3 5" + " ".join(map(str, answer_of(by_hand())))


def test_the_exported_program_has_the_updates(tuned):
    """Of rows of any number and length, as a plain model computes them."""
    assert exit_code("export", "run", "exported") == 0
    program = jax_export.deserialize(bytearray(Path("exported/model.jax").read_bytes()))
    arrays, own = load_file("exported/model.safetensors"), importlib.import_module("own_model").Own()
    for shape in ((1, 3), (5, 8)):
        tokens = np.arange(shape[0] * shape[1], dtype=np.int32).reshape(shape)
        got = program.call(arrays, {"tokens": tokens})
        assert abs(got - own.apply({"params": by_hand()}, tokens)).max() < 1e-5
    signature = json.loads(Path("exported/signature.json").read_text())
    assert signature["inputs"] == [{"name": "tokens", "dtype": "int32", "shape": ["batch", "seq"]}]
    assert signature["outputs"] == [{"name": "output", "dtype": "float32", "shape": ["batch", "seq", 64]}]
    assert {one["name"] for one in signature["parameters"]} == {*flatten_with_paths(by_hand())}


def test_the_onnx_graph_has_the_updates(tuned):
    """ONNX Runtime computes the logits of a plain model, of rows of any number and length."""
    assert exit_code("export", "run", "graph", "--format", "onnx") == 0
    session = onnxruntime.InferenceSession("graph/model.onnx")
    own = importlib.import_module("own_model").Own()
    for shape in ((1, 3), (5, 8)):
        tokens = np.arange(shape[0] * shape[1], dtype=np.int32).reshape(shape)
        (got,) = session.run(["output"], {"tokens": tokens})
        assert abs(got - own.apply({"params": by_hand()}, tokens)).max() < 1e-5


def test_packages_that_a_graph_needs_are_listed_with_the_command_that_installs_them(tuned, capsys, monkeypatch):
    monkeypatch.setattr(onnx_graph, "find_spec", lambda package: package not in ("jax2onnx", "equinox"))
    assert exit_code("export", "run", "none", "--format", "onnx") == 2
    error = capsys.readouterr().err
    assert "jax2onnx" in error and "equinox" in error and "pip install --no-deps jax2onnx==0.17.1" in error
    assert not Path("none").exists()


def test_an_operation_without_onnx_operators_is_refused(tmp_path):
    def forward(arrays, x):
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    made = Exportable(forward, {}, jax.ShapeDtypeStruct((1, 4), jnp.float32))
    with pytest.raises(ConfigError, match=r"jax2onnx does not convert it: .*callback.*; export --format stablehlo"):
        onnx_graph.convert(made, tmp_path / "model.onnx")


def test_a_graph_that_no_runtime_loads_is_refused_and_nothing_is_left(tmp_path):
    """Rotary positions as complex numbers, which jax2onnx writes and ONNX Runtime does not have."""

    def forward(arrays, x):
        angle = jnp.arange(x.shape[1], dtype=jnp.float32)
        turned = jax.lax.complex(x[..., ::2], x[..., 1::2]) * jnp.exp(1j * angle)[:, None]
        return jnp.concatenate([turned.real, turned.imag], -1)

    made = Exportable(forward, {}, jax.ShapeDtypeStruct((1, 4, 6), jnp.float32))
    with pytest.raises(ConfigError, match=r"export --format stablehlo"):
        onnx_graph.convert(made, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
