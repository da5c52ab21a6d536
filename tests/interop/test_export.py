"""Exports of a trained model run in environments without meshpar, and compute its logits."""

from __future__ import annotations

import json
import site
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import onnxruntime
import pytest
import transformers
from flax import nnx
from jax import export as jax_export
from safetensors.numpy import load_file

from meshpar import convert
from meshpar.export.forward import of_decoder
from meshpar.export.stablehlo_program import exported_for, stablehlo
from meshpar.models import Llama
from meshpar.nn.describe import functional
from meshpar.nn.experts import Balance, Experts
from meshpar.tree import flatten_with_paths
from tests.interop.pretrained import VOCAB, logits, made, saved

TOKENS = np.random.default_rng(0).integers(0, VOCAB, (3, 17))
ALONE = """
import importlib.util, pathlib, sys
sys.path.append(sys.argv[1])
import numpy
from jax import export
from safetensors.numpy import load_file
assert importlib.util.find_spec("meshpar") is None
folder = pathlib.Path(sys.argv[2])
program = export.deserialize(bytearray((folder / "model.jax").read_bytes()))
numpy.save(sys.argv[4], program.call(load_file(folder / "model.safetensors"), numpy.load(sys.argv[3])))
"""
"""Runs an exported folder: PACKAGES FOLDER TOKENS.npy LOGITS.npy."""


def exported(kind, folder):
    """Makes a Hugging Face folder, a run of it, and the run's StableHLO export."""
    convert.from_hf(saved(kind, folder / "hf"), folder / "run", ["mesh.fsdp=8", "rules=[fsdp]"])
    stablehlo(folder / "run", folder / "stablehlo", ["cpu", "cuda", "tpu"])
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return exported("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def with_experts(tmp_path_factory):
    return exported("mixtral", tmp_path_factory.mktemp("mixtral"))


@pytest.fixture(scope="module")
def expected():
    """The logits that transformers computes."""
    return logits(made("llama"), TOKENS)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_stablehlo_runs_without_meshpar(kind, request, tmp_path):
    folder = request.getfixturevalue({"llama": "folder", "mixtral": "with_experts"}[kind])
    packages = tmp_path / "packages"
    packages.mkdir()
    for path in Path(site.getsitepackages()[0]).iterdir():
        if "meshpar" not in path.name and path.suffix != ".pth":
            (packages / path.name).symlink_to(path)
    np.save(tmp_path / "tokens.npy", TOKENS.astype(np.int32))
    arguments = [packages, folder / "stablehlo", tmp_path / "tokens.npy", tmp_path / "logits.npy"]
    done = subprocess.run([sys.executable, "-I", "-S", "-c", ALONE, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert abs(np.load(tmp_path / "logits.npy") - logits(made(kind), TOKENS)).max() < 1e-5


def test_the_signature_describes_the_program(folder):
    signature = json.loads((folder / "stablehlo/signature.json").read_text())
    program = jax_export.deserialize(bytearray((folder / "stablehlo/model.jax").read_bytes()))
    assert signature["platforms"] == list(program.platforms) == ["cpu", "cuda", "tpu"]
    arguments = [*signature["parameters"], *signature["inputs"]]
    assert [[*map(str, aval.shape)] for aval in program.in_avals] == [[*map(str, one["shape"])] for one in arguments]
    assert {one["name"]: one["shape"] for one in signature["parameters"]} == {
        name: list(x.shape) for name, x in load_file(folder / "stablehlo/model.safetensors").items()
    }
    assert signature["outputs"] == [{"name": "logits", "dtype": "float32", "shape": ["batch", "seq", VOCAB]}]


def test_control_exchanged_parameters_are_seen(folder, expected):
    program = jax_export.deserialize(bytearray((folder / "stablehlo/model.jax").read_bytes()))
    right = load_file(folder / "stablehlo/model.safetensors")
    exchanged = right | {"blocks.mlp.up.kernel": right["blocks.mlp.gate.kernel"]}
    tokens = TOKENS[:1, :5].astype(np.int32)
    assert abs(program.call(right, tokens) - expected[:1, :5]).max() < 1e-5
    assert abs(program.call(exchanged, tokens) - expected[:1, :5]).max() > 1e-2


def test_control_exchanged_experts_are_seen(with_experts):
    program = jax_export.deserialize(bytearray((with_experts / "stablehlo/model.jax").read_bytes()))
    right = load_file(with_experts / "stablehlo/model.safetensors")
    down = "blocks.mlp.experts.down.kernel"
    exchanged = right | {down: np.roll(right[down], 1, axis=1)}
    tokens = TOKENS[:1, :5].astype(np.int32)
    want = logits(made("mixtral"), TOKENS[:1, :5])
    assert abs(program.call(right, tokens) - want).max() < 1e-5
    assert abs(program.call(exchanged, tokens) - want).max() > 1e-2


EXPERTS = Experts(
    num=6, per_token=3, intermediate_size=12, first_dense=1, shared=1, router="sigmoid", groups=3, groups_per_token=2,
    balance=Balance(load="last_step"),
)  # fmt: skip


@pytest.mark.parametrize("dispatch", ["dropless", pytest.param("capacity", marks=pytest.mark.slow)])
def test_groups_of_experts_are_exported_for_any_number_of_tokens(dispatch, float64):
    """With places for all choices, the program without places computes the same."""
    experts = EXPERTS.model_copy(update={"dispatch": dispatch, "capacity_factor": 6.0})
    model = Llama(num_layers=2, hidden_size=16, num_heads=2, intermediate_size=32, vocab_size=VOCAB, experts=experts)
    params = nnx.to_pure_dict(nnx.state(model.build(nnx.Rngs(0)), nnx.Param))
    params = jax.tree.map(lambda x: 3 * np.asarray(x, np.float64), params)
    flat = flatten_with_paths(params)
    program = exported_for(of_decoder(model, "float64", flat), ["cpu"])
    assert len(program.module_kept_var_idx) == len(flat) + 1, "the program has all arguments of its signature"
    own = jax.jit(functional(model.abstract()))
    for shape in ((1, 3), (5, 30)):  # fewer choices than a tile has rows, and several tiles
        tokens = np.random.default_rng(0).integers(0, VOCAB, shape).astype(np.int32)
        positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
        inputs = {"tokens": tokens, "positions": positions, "segments": np.zeros_like(tokens)}
        want = own(params, inputs | {"rows": np.arange(shape[0], dtype=np.int32)})
        assert abs(program.call(flat, tokens) - want).max() < 1e-10


def test_onnx_runtime_computes_the_logits(folder, expected, command, tmp_path):
    assert command("export", folder / "run", tmp_path / "onnx", "--format", "onnx").code == 0
    session = onnxruntime.InferenceSession(tmp_path / "onnx/model.onnx")
    for rows, length in ((3, 17), (1, 5)):
        (got,) = session.run(["logits"], {"tokens": TOKENS[:rows, :length]})
        assert abs(got - expected[:rows, :length]).max() < 1e-5


def test_hf_writes_the_tensors_that_the_run_came_from(folder, command, tmp_path):
    assert command("export", folder / "run", tmp_path / "hf", "--format", "hf").code == 0
    written = load_file(tmp_path / "hf/model.safetensors")
    original = load_file(folder / "hf/model.safetensors")
    assert {*written} == {*original}
    assert all((written[name] == original[name]).all() for name in original)


@pytest.mark.slow
def test_a_compressed_run_is_exported_as_codes_and_as_the_kernels_that_they_stand_for(folder, command, tmp_path):
    small = tmp_path / "small"
    how = ["--weights", "int4", "--group", "8", "--low-rank-error", "0.6"]
    assert command("compress", folder / "run", small, *how).code == 0
    assert command("export", small, tmp_path / "stablehlo").code == 0
    assert command("export", small, tmp_path / "hf", "--format", "hf").code == 0
    codes = load_file(tmp_path / "stablehlo/model.safetensors")
    dense = load_file(folder / "stablehlo/model.safetensors")
    assert {codes[path].dtype.name for path in codes if path.endswith(".codes")} == {"uint8"}
    assert any(".expand." in path for path in codes)
    assert sum(x.nbytes for x in codes.values()) < 0.6 * sum(x.nbytes for x in dense.values())
    program = jax_export.deserialize(bytearray((tmp_path / "stablehlo/model.jax").read_bytes()))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    got = program.call(codes, TOKENS.astype(np.int32))
    assert abs(got - logits(model, TOKENS)).max() < 1e-4
    assert abs(got - logits(made("llama"), TOKENS)).max() > 1e-2
    again = command("compress", small, tmp_path / "smaller", "--weights", "int8")
    assert again.code == 2 and "is compressed already" in again.err


REFUSED = {
    "an existing folder": (["run", "stablehlo"], "exists, and nothing is overwritten"),
    "an existing folder for onnx": (["run", "stablehlo", "--format", "onnx"], "exists, and nothing is overwritten"),
    "a platform": (["run", "new", "--platforms", "cpu,cudaa"], "did you mean cuda?"),
    "no platform": (["run", "new", "--platforms", ","], "no platform is listed"),
    "platforms of onnx": (["run", "new", "--format", "onnx", "--platforms", "cpu"], "is for --format stablehlo"),
    "no run": (["nowhere", "new"], "nowhere"),
}


REFUSED_COMPRESSION = {
    "nothing to do": (["compress", "run", "new"], "needs --weights"),
    "an existing folder": (["compress", "run", "hf", "--weights", "int8"], "exists, and nothing is overwritten"),
    "an error of a norm": (["compress", "run", "new", "--low-rank-error", "2"], "is not between 0 and 1"),
    "groups": (["compress", "run", "new", "--weights", "int4", "--group", "24"], "cannot be divided into groups of 24"),
    "two drafters": (["generate", "run", "--prompt", "3", "--draft", "run", "--ngrams", "2"], "leave out one of"),
}


@pytest.mark.parametrize("case", REFUSED_COMPRESSION)
def test_a_bad_compression_is_refused_and_nothing_is_written(case, folder, command, monkeypatch):
    monkeypatch.chdir(folder)
    before = sorted(folder.iterdir())
    words, message = REFUSED_COMPRESSION[case]
    result = command(*words)
    assert result.code == 2
    assert message in result.err
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_and_nothing_is_written(case, folder, command, monkeypatch):
    monkeypatch.chdir(folder)
    before = sorted(folder.iterdir())
    words, message = REFUSED[case]
    result = command("export", *words)
    assert result.code == 2
    assert message in result.err
    assert sorted(folder.iterdir()) == before
