"""The literal text of the errors that a user causes, and exit code 2 without a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from meshpar.errors import MeshparError, ShardingError
from meshpar.mesh.layout import MeshLayout
from meshpar.sharding.resolve import resolve
from meshpar.sharding.rules import AxisRules
from meshpar.sharding.spec import ArraySpec

CONFIG = """\
model: {kind: llama, num_layers: 2, hidden_size: 16, num_heads: 4, num_kv_heads: 2, intermediate_size: 32}
data: {kind: synthetic, vocab_size: 64, batch_size: 8, seq_len: 16}
optim: {kind: adamw, lr: 1e-3}
mesh: {data: 2, fsdp: 2, tensor: 2}
rules: [fsdp, megatron]
num_steps: 2
run_dir: runs/test
"""
EXTRA = "model.vocab_size=64"


@pytest.fixture
def meshpar(command, monkeypatch, tmp_path):
    """Runs a verb on CONFIG."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return lambda verb, *arguments: command(verb, "config.yaml", *arguments)


REFUSED = {
    "unknown key": (
        ["model.num_layer=3"],
        """\
meshpar: 1 problem in config.yaml:
  model.num_layer (command line)
    unknown key
    did you mean model.num_layers?
""",
    ),
    "wrong type": (
        ["num_steps=many", "optim.lr=true"],
        """\
meshpar: 2 problems in config.yaml:
  optim.lr (command line)
    expected a number, got True
  num_steps (command line)
    expected an integer, got 'many'
""",
    ),
    "unknown kind": (
        ["optim.kind=adam"],
        """\
meshpar: 1 problem in config.yaml:
  optim (config.yaml:3)
    no kind is called 'adam'
    did you mean adamw? There are adamw, lion, sgd, adafactor, muon
""",
    ),
    "unknown activation": (
        ["model.remat={save: [q, gat], offload: [q]}"],
        """\
meshpar: 1 problem in config.yaml:
  model.remat.save.1 (command line)
    expected 'input', 'q', 'k', 'v', 'attn', 'log_mass', 'residual', 'gate' or 'up', got 'gat'
    did you mean gate?
""",
    ),
    "stochastic rounding of another dtype": (
        ["precision.rounding=stochastic"],
        """\
meshpar: 1 problem in config.yaml:
  precision
    rounding: stochastic is for params: bfloat16, and not for float32
""",
    ),
    "offload in a pipeline": (
        [
            EXTRA,
            "mesh={pipe: 2}",
            "rules=pipeline",
            "parallel.pipeline={kind: 1f1b, num_microbatches: 2}",
            "model.remat.offload=[q]",
        ],
        """\
meshpar: the parts of this config do not fit each other:
  model.remat.offload
    stages save activations in branches, and XLA would hold two copies of each slot in the host's memory
    no model.remat.offload, or parallel.pipeline=null
""",
    ),
    "activation in two places": (
        ["model.remat={save: [q, up], offload: [q]}"],
        """\
meshpar: 1 problem in config.yaml:
  model.remat (command line)
    q: in save and in offload, but an activation has one place
""",
    ),
    "activation of another kind of model": (
        ["model.kind=gpt", "model.num_kv_heads=4", "model.remat.save=[gate, up]", EXTRA],
        """\
meshpar: the parts of this config do not fit each other:
  model.remat.save
    a block of kind gpt has no gate, only input, q, k, v, attn, log_mass, residual, up
    leave out gate
""",
    ),
    "attention beyond the limits of its kernel": (
        ["model.attention=cudnn", EXTRA],
        """\
meshpar: the parts of this config do not fit each other:
  model.attention = cudnn
    cudnn computes bfloat16 and float16, and this model computes float32
    model.attention=blocks
  model.attention = cudnn
    cudnn needs heads of at most 256 elements, a multiple of 8, and these have 4
    model.attention=blocks
""",
    ),
    "attention with blocks that a TPU cannot have": (
        ["model.attention={kind: splash, block_size: 100}", EXTRA],
        """\
meshpar: 1 problem in config.yaml:
  model.attention.block_size (command line)
    must be a multiple of 128, got 100
""",
    ),
    "indivisible dim": (
        ["mesh.tensor=4", EXTRA, "rules=megatron"],
        """\
meshpar: 2 arrays do not fit mesh (data=2, fsdp=2, tensor=4):
  blocks.attn.k.kernel  float32[2, 16, 2, 4]  (layers, embed, kv_heads, head_dim)
    kv_heads = 2 is not divisible by tensor = 4    rule kv_heads -> tensor   (preset megatron, partition)
    either mesh.tensor=2, or rules.kv_heads=[] to replicate it (at most +768 B per device)
  blocks.attn.v.kernel  float32[2, 16, 2, 4]  (layers, embed, kv_heads, head_dim)
    kv_heads = 2 is not divisible by tensor = 4    rule kv_heads -> tensor   (preset megatron, partition)
    either mesh.tensor=2, or rules.kv_heads=[] to replicate it (at most +768 B per device)
""",
    ),
    "a rule for a dim that no parameter has": (
        [EXTRA, "rules.kv_head=[]"],
        """\
meshpar: the rules do not fit mesh (data=2, fsdp=2, tensor=2):
  rules.kv_head
    no parameter has such a dim
    did you mean rules.kv_heads?
""",
    ),
    "two rules in conflict": (
        ["rules=[zero1, fsdp]"],
        """\
meshpar: 1 problem in config.yaml:
  rules (command line)
    two rules disagree:
      rules.zero
        preset zero1 sets 1, preset fsdp sets 3
        keep one of the two presets
""",
    ),
    "an axis that no rule uses": (
        [EXTRA, "mesh.data=1", "mesh.pipe=2"],
        """\
meshpar: the rules do not fit mesh (fsdp=2, pipe=2, tensor=2):
  mesh.pipe = 2
    no rule uses this axis: its 2 devices would all do the same work
    mesh.pipe=1, or a rule or preset that uses it
""",
    ),
    "layers that are not padded unasked": (
        [
            EXTRA,
            "model.num_layers=3",
            "mesh={fsdp: 2, pipe: 2, tensor: 2}",
            "rules=[pipeline, fsdp, megatron]",
            "parallel.pipeline={kind: 1f1b, num_microbatches: 2}",
        ],
        """\
meshpar: the parts of this config do not fit each other:
  model.num_layers
    3 layers cannot be divided equally among 2 stages
    model.pad_layers_to_multiple=2 to add 1 of zeros, or rules.layers=[] to store all on each stage
""",
    ),
    "parts that do not fit each other": (
        ["data.batch_size=6", "num_microbatches=4", "model.vocab_size=50"],
        """\
meshpar: the parts of this config do not fit each other:
  data.batch_size
    6 rows cannot be cut into 16 equal parts (4 devices x 4 microbatches)
    a multiple of 16
  model.vocab_size
    the data has 64 token ids, the model 50
    model.vocab_size=64
""",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_mistake_is_reported_and_ends_with_2(meshpar, mistake):
    overrides, text = REFUSED[mistake]
    assert meshpar("explain", *overrides) == (2, "", text)


def test_a_mesh_larger_than_the_devices_is_refused(meshpar):
    assert meshpar("train", "mesh.data=4", EXTRA, "--devices", "8") == (
        2,
        "",
        """\
meshpar: mesh (data=4, fsdp=2, tensor=2) does not fit 8 devices:
  mesh.data
    the sizes multiply to 16, more than the 8 devices available
    data=2 would fit
  mesh.fsdp
    the sizes multiply to 16, more than the 8 devices available
    fsdp=1 would fit
  mesh.tensor
    the sizes multiply to 16, more than the 8 devices available
    tensor=1 would fit
  devices
    JAX has started with 8 CPU devices
    request 16 before JAX starts: meshpar.simulate(16), --devices 16 or JAX_NUM_CPU_DEVICES=16
""",
    )


def test_a_parameter_that_no_rule_covers_is_refused():
    specs = {
        "bias": ArraySpec((8,), np.dtype("float32"), ("width",)),
        "w": ArraySpec((8,), np.dtype("float32"), ("embd",)),
    }
    with pytest.raises(ShardingError) as refused:
        resolve(specs, AxisRules(preset="fsdp"), MeshLayout(fsdp=2).abstract())
    assert (
        str(refused.value)
        == """\
2 arrays do not fit mesh (fsdp=2):
  bias  float32[8]  (width)
    no rule covers width
    rules.width=[] to leave it whole, or a preset
  w  float32[8]  (embd)
    no rule covers embd (there is one for embed)
    rules.embd=[] to leave it whole, or a preset"""
    )


def test_rules_that_disagree_are_listed_together():
    with pytest.raises(ShardingError) as refused:
        AxisRules(embed=("fsdp",), mlp=()) | AxisRules(embed=("tensor",), mlp=("tensor",))
    assert (
        str(refused.value)
        == """\
two rules disagree:
  rules.embed
    [fsdp] and [tensor]
    keep one of the two
  rules.mlp
    [] and [tensor]
    keep one of the two"""
    )


def test_a_file_that_is_missing_or_no_mapping_or_no_yaml_is_refused(meshpar):
    Path("config.yaml").unlink()
    where = f"  it is relative to the working directory, {Path.cwd()}"
    assert meshpar("train")[::2] == (2, f"meshpar: config.yaml cannot be read: No such file or directory\n{where}\n")
    Path("config.yaml").write_text("- a\n- b\n")
    assert meshpar("train")[::2] == (2, "meshpar: config.yaml holds a list, not a mapping of keys\n")
    Path("config.yaml").write_text("model: {kind: llama\n")
    assert meshpar("train")[::2] == (
        2,
        "meshpar: config.yaml:2:1 is not YAML: expected ',' or '}', but got '<stream end>'\n",
    )


def test_a_repeated_key_and_an_extends_that_leaves_the_folder_are_refused(meshpar):
    Path("config.yaml").write_text("extends: ../other.yaml\n" + CONFIG + "num_steps: 3\n")
    assert (
        meshpar("explain")[2]
        == """\
meshpar: 2 problems in config.yaml:
  num_steps (config.yaml:9)
    this key appears twice
    remove one of the two
  extends (config.yaml:1)
    '../other.yaml' is not a path inside this file's folder
    write a path relative to this folder, without '..'
"""
    )


def test_a_path_that_no_parameter_has_is_refused(meshpar):
    code, _, message = meshpar("explain", EXTRA, "blocks.attn.q.kernl")
    assert (code, message) == (
        2,
        "meshpar: no parameter matches 'blocks.attn.q.kernl'; did you mean blocks.attn.q.kernel?\n",
    )


def test_a_step_that_breaks_its_contract_is_refused(meshpar):
    code, _, message = meshpar("inspect", EXTRA, "contract={all_reduce: {axes: [data]}, reduce_scatter: {times: 0}}")
    assert code == 2
    assert message.startswith(
        "meshpar: the compiled step breaks its contract:\n  contract.reduce_scatter.times\n    runs "
    )
    assert (
        "  contract.all_reduce.axes\n    runs over other axes than data:\n      all_reduce over tensor  2x  " in message
    )
    assert "Traceback" not in message


KEPT = "kept.json"
NOT_DRAWN = {
    "no folder": (
        ["--html", "nowhere/step.html"],
        "--html nowhere/step.html: cannot be written: No such file or directory",
    ),
    "a folder": (["--html", "."], "--html .: cannot be written: it is a folder"),
    "two programs": (
        ["--diff", KEPT, "--html", "step.html"],
        "--html draws one program, --diff compares two: use one of them",
    ),
}
NOT_COMPARED = {
    "one": (["--diff"], "--diff compares two programs, got config.yaml"),
    "three": (["--diff", "a", "b"], "--diff compares two programs, got config.yaml and a and b"),
    "no config": (["--diff", "b.yaml"], "b.yaml cannot be read: No such file or directory"),
    "no file": (["--diff", "b.json"], "b.json cannot be read: No such file or directory"),
    "a change of what was compiled": (
        ["--diff", KEPT, "num_steps=3"],
        "kept.json holds a compiled program, which num_steps=3 cannot change",
    ),
    "another file": (
        ["--diff", KEPT],
        """\
kept.json was not written by `meshpar inspect --json`:
  mesh
    Field required
  sent_bytes
    Field required
  sent_bytes_per_axis
    Field required
  traced_bytes_per_axis
    Field required
  collectives
    Field required
  flops
    Input should be a valid integer
  memory
    Field required
  largest
    Field required
  opaque
    Field required""",
    ),
}


@pytest.mark.parametrize("case", NOT_DRAWN)
def test_a_page_that_cannot_be_written_is_refused(meshpar, case):
    options, message = NOT_DRAWN[case]
    code, out, err = meshpar("inspect", EXTRA, *options)
    assert (code, out) == (2, "")
    assert err.partition("\n  it is relative to")[0].rstrip("\n") == f"meshpar: {message}"


@pytest.mark.parametrize("case", NOT_COMPARED)
def test_programs_that_cannot_be_compared_are_refused(meshpar, case):
    options, message = NOT_COMPARED[case]
    Path(KEPT).write_text('{"flops": "many"}')
    code, out, err = meshpar("inspect", EXTRA, *options)
    assert (code, out) == (2, "")
    assert err.partition("\n  it is relative to")[0].rstrip("\n") == f"meshpar: {message}"


def test_diff_may_stand_before_the_programs(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    message = "meshpar: a.json cannot be read: No such file or directory\n"
    assert command("inspect", "--diff", "a.json", "b.yaml") == (2, "", message)


def test_a_picture_in_a_missing_folder_is_refused(meshpar):
    message = "meshpar: --svg nowhere/a.svg: cannot be written: No such file or directory\n"
    assert meshpar("explain", EXTRA, "--svg", "nowhere/a.svg") == (2, "", message)


def test_an_unknown_option_ends_with_2(meshpar):
    assert meshpar("train", "--devcies", "8")[0] == 2


def test_explain_as_json_has_the_bytes_of_each_array(meshpar):
    code, out, _ = meshpar("explain", EXTRA, "--json")
    report = json.loads(out)
    kernel = report["arrays"]["blocks.attn.q.kernel"]
    assert (code, kernel["local_shape"], kernel["bytes_per_device"], kernel["copies"]) == (0, [2, 8, 2, 4], 512, 2)
    assert set(report["bytes_per_device"]) == {"parameters", "gathered", "gradients", "optimizer"}


def test_explain_lists_the_dims_that_a_user_replicates(meshpar):
    _, out, _ = meshpar("explain", EXTRA, "mesh.tensor=4", "rules.kv_heads=[]", "blocks.attn.k.kernel")
    assert "    kv_heads -> []   (rules.kv_heads)\n" in out


def test_a_sharding_error_is_a_value_error_too():
    assert issubclass(ShardingError, (MeshparError, ValueError))
