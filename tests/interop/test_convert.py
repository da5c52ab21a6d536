"""From a Hugging Face folder to a run and back; fine-tuning from one; and what cannot be converted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import transformers

from meshpar import convert
from meshpar.data import Synthetic
from meshpar.errors import Problems
from meshpar.experiment.actions import fit
from meshpar.experiment.config import Init, Run, load
from meshpar.interop.safetensors import Written, tensors_in, write
from meshpar.mesh.layout import MeshLayout
from meshpar.nn.lora import LoRA
from meshpar.optim import AdamW
from meshpar.sharding.rules import AxisRules
from meshpar.tree import flatten_with_paths
from tests.interop.pretrained import VOCAB, logits, saved
from tests.interop.test_huggingface import TOKENS, _same_bits, our_logits, params


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = saved("smollm", tmp_path_factory.mktemp("smollm"), "bfloat16")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def copied(original, tmp_path):
    shutil.copytree(original, tmp_path / "hf")
    return tmp_path / "hf"


@pytest.fixture
def meshpar(command, monkeypatch, tmp_path):
    """Runs a verb; returns its exit code and its stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        result = command(*arguments)
        return result.code, result.err

    return call


def test_a_run_is_made_and_written_back_bit_for_bit(original, meshpar, tmp_path):
    assert meshpar("convert", "run", "mesh.fsdp=8", "rules=[fsdp]", "--from-hf", original) == (0, "")
    run = load(tmp_path / "run/config.yaml")
    assert (run.model.vocab_size, run.model.tie_embeddings, run.precision.params) == (VOCAB, True, "bfloat16")
    assert run.init == Init(from_checkpoint=Path("run"))
    assert run.data.kind == "none"
    assert meshpar("convert", "run", "--to-hf", "back") == (0, "")
    _same_bits(original, tmp_path / "back")
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "back" / name).read_text() == (original / name).read_text()
    for again in (("run", "--from-hf", original), ("run", "--to-hf", "back")):
        code, message = meshpar("convert", *again)
        assert code == 2 and "exists, and nothing is overwritten" in message
    assert {path.name for path in tmp_path.iterdir()} == {"run", "back"}


def test_fine_tuning_with_lora_is_merged_on_export(tmp_path):
    saved("llama", tmp_path / "there")
    run = Run(
        model=convert.open_folder(tmp_path / "there").model,
        data=Synthetic(
            vocab_size=VOCAB, batch_size=8, seq_len=16, num_documents=32, document_len=40, held_out_fraction=0.2
        ),
        optim=AdamW(lr=1e-2),
        init=Init(from_hf=tmp_path / "there"),
        lora=LoRA(rank=4, paths=("blocks.**",)),
        mesh=MeshLayout(fsdp=8),
        rules=AxisRules(preset=("fsdp",)),
        num_steps=2,
        run_dir=tmp_path / "run",
    )
    state = fit(run)
    trained = {path: jax.device_put(np.asarray(array)) for path, array in flatten_with_paths(state.params).items()}
    start = params(convert.open_folder(tmp_path / "there"))
    assert all(np.array_equal(trained[path], start[path]) for path in start)
    assert run.lora is not None
    merged = run.lora.merged(trained)
    convert.to_hf(tmp_path / "run", tmp_path / "tuned")
    expected = logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned").eval(), TOKENS)
    np.testing.assert_allclose(our_logits(run.model, merged), expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(our_logits(run.model, trained, run.lora), expected, rtol=0, atol=1e-5)
    assert abs(our_logits(run.model, start) - expected).max() > 1e-3


# What cannot be converted -----------------------------------------------------------------------------------------


def config(**changes):
    def change(folder):
        read = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(read | changes))

    return change


def tensors(change):
    """Rewrites the tensors: `change` gets name -> array."""

    def rewrite(folder):
        path = folder / "model.safetensors"
        arrays = {name: tensor.read() for name, tensor in tensors_in(path, Problems()).items()}
        path.unlink()
        change(arrays)
        write(path, [Written(name, x.dtype, x.shape, lambda x=x: x) for name, x in arrays.items()])

    return rewrite


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def with_a_wrong_shape(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"shape":[96,32]', b'"shape":[99,32]', 1))


def indexed(**where):
    def change(folder):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))

    return change


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


DOWN = "model.layers.1.mlp.down_proj.weight"
UP = "model.layers.0.mlp.up_proj.weight"
REFUSED = {
    "cut short": (cut, """\
meshpar: hf cannot be imported:
  hf/model.safetensors
    is truncated: it has 45361 bytes, and its header needs 45368
    download it again
"""),
    "a header with a wrong shape": (with_a_wrong_shape, """\
meshpar: hf cannot be imported:
  hf/model.safetensors: model.embed_tokens.weight
    BF16[99, 32] needs 6336 bytes, but its header gives it 6144
    download the file again
"""),
    "missing tensors": (tensors(lambda arrays: [arrays.pop(name) for name in (DOWN, UP)]), f"""\
meshpar: hf does not hold what its config.json describes:
  {UP}
    is missing; config.json requires [64, 32]
  {DOWN}
    is missing; config.json requires [32, 64]
"""),
    "a tensor too many": (tensors(lambda arrays: arrays.update({"model.layers.0.extra": arrays[UP]})), """\
meshpar: hf does not hold what its config.json describes:
  model.layers.0.extra
    is in model.safetensors, but is no parameter of this model
"""),
    "integers": (tensors(lambda arrays: arrays.update({UP: np.ones((64, 32), np.int8)})), f"""\
meshpar: hf does not hold what its config.json describes:
  {UP}
    is int8 in model.safetensors, and only float64, float32, float16, bfloat16 are read
"""),
    "another vocabulary": (config(vocab_size=100), """\
meshpar: hf does not hold what its config.json describes:
  model.embed_tokens.weight
    is [96, 32] in model.safetensors, config.json requires [100, 32]
    config.json has vocab_size 100
"""),
    "an unknown architecture": (config(model_type="lama"), """\
meshpar: hf cannot be imported:
  hf/config.json: model_type
    'lama' is not supported
    supported: apertus, bloom, cohere, cohere2, deepseek_v2, deepseek_v3, ernie4_5, exaone4, falcon, gemma, gemma2, \
gemma3_text, glm4, glm4_moe, gpt2, gpt_neox, gpt_oss, gptj, granite, granitemoe, hunyuan_v1_dense, internlm3, kimi_k2, \
llama, ministral, ministral3, mistral, mixtral, nemotron, olmo, olmo2, olmo3, olmoe, opt, phi, phi3, phimoe, qwen2, \
qwen2_moe, qwen3, qwen3_moe, seed_oss, smollm3, stablelm, starcoder2; did you mean llama?
"""),
    "rope, activation and quantization": (
        config(rope_parameters={"rope_type": "yarn"}, hidden_act="gelu", quantization_config={"bits": 4}), """\
meshpar: hf cannot be imported:
  hf/config.json: quantization_config
    is {'bits': 4}, and only null is supported
    download the checkpoint in bfloat16
  hf/config.json: hidden_act
    'gelu' is not supported for this model, only silu
  hf/config.json: rope_parameters
    rope_type 'yarn' is not supported for llama
    supported: default, linear, llama3
"""),
    "a key of another type": (config(hidden_size="32", num_hidden_layers=None), """\
meshpar: hf cannot be imported:
  hf/config.json: num_hidden_layers
    is null, which LlamaConfig does not allow
    num_hidden_layers: 32
  hf/config.json: hidden_size
    Input should be a valid integer, got '32'
"""),
    "no config": (lambda folder: (folder / "config.json").unlink(), """\
meshpar: hf cannot be imported:
  hf/config.json
    cannot be read: No such file or directory
"""),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), """\
meshpar: hf cannot be imported:
  hf/config.json
    is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)
"""),
    "pickles": (pickled, """\
meshpar: hf cannot be imported:
  hf
    there is neither model.safetensors nor model.safetensors.index.json
    pytorch_model.bin is a pickle, which is not read: save the model as safetensors
"""),
    "an index that leads elsewhere": (indexed(**{UP: "../hf/model.safetensors", DOWN: "other.safetensors"}), """\
meshpar: hf cannot be imported:
  hf/model.safetensors.index.json: weight_map
    '../hf/model.safetensors' is not the name of a file in this folder
  hf/other.safetensors
    cannot be read: No such file or directory
"""),
    "an index that is wrong": (indexed(nothing="model.safetensors"), """\
meshpar: hf cannot be imported:
  hf/model.safetensors
    has no nothing, though the index says so
"""),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_folder_is_refused_and_nothing_is_left_behind(case, copied, meshpar, tmp_path):
    change, text = REFUSED[case]
    change(copied)
    assert meshpar("convert", "run", "--from-hf", "hf") == (2, text)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_bad_arguments_of_convert_are_refused_and_write_nothing(original, meshpar, tmp_path):
    assert meshpar("convert", "run", "--from-hf", "nothing")[1].startswith("meshpar: nothing cannot be imported:")
    assert meshpar("convert", "run") == (2, "meshpar: convert needs either --from-hf DIR or --to-hf DIR\n")
    assert meshpar("convert", "run", "--to-hf", "x") == (2, f"meshpar: {tmp_path / 'run'} does not exist\n")
    code, message = meshpar("convert", "run", "optim.l=1", "--from-hf", original)
    assert code == 2 and "did you mean optim.lr?" in message
    assert not [*tmp_path.iterdir()]


MINE = """\
model: {kind: llama, vocab_size: 64, num_layers: 2, hidden_size: 32, num_heads: 4, intermediate_size: 64,
  tie_embeddings: true}
data: {kind: synthetic, vocab_size: 64, batch_size: 8, seq_len: 16}
optim: {kind: adamw, lr: 1e-3}
init: {from_hf: hf}
num_steps: 2
run_dir: run
"""


def test_a_run_with_another_model_is_refused(copied, meshpar, tmp_path):
    (tmp_path / "mine.yaml").write_text(MINE)
    assert meshpar("train", "mine.yaml", "mesh.data=8") == (2, """\
meshpar: the model of init.from_hf differs from the run's:
  model.max_seq_len
    2048 in this run, 64 in hf/config.json
    model.max_seq_len=64
  model.norm_eps
    1e-05 in this run, 1e-06 in hf/config.json
    model.norm_eps=1e-06
  model.num_kv_heads
    4 in this run, 2 in hf/config.json
    model.num_kv_heads=2
  model.vocab_size
    64 in this run, 96 in hf/config.json
    model.vocab_size=96
""")  # fmt: skip


def test_globs_that_match_nothing_are_refused(copied, meshpar, tmp_path):
    (tmp_path / "mine.yaml").write_text(MINE)
    assert meshpar("explain", "mine.yaml", "lora={kind: lora, paths: [blocks.atn.q, head.*]}") == (2, """\
meshpar: LoRA adapts the projections of a model:
  lora.paths
    'blocks.atn.q' matches no projection
    did you mean blocks.attn.q?
  lora.paths
    'head.*' matches no projection
    there are blocks.attn.*, blocks.mlp.*
""")  # fmt: skip
    assert meshpar("explain", "mine.yaml", "freeze=['**', embeding]") == (2, """\
meshpar: freeze does not fit the model:
  freeze.1.paths
    no parameter matches 'embeding'
    did you mean embedding?
  freeze
    every parameter is frozen for the whole run
    leave at least one to train
""")  # fmt: skip


def test_a_model_that_no_architecture_computes_is_not_exported(original, tmp_path):
    pretrained = convert.open_folder(original)
    odd = pretrained.model.model_copy(update={"attn_bias": "qkv", "qk_norm": True})
    with pytest.raises(convert.CheckpointError, match="none of the supported architectures computes"):
        convert.export(tmp_path / "x", odd, {"embedding": np.zeros((96, 32))})
    assert not (tmp_path / "x").exists()
