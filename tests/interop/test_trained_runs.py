"""Runs with LoRA, with pruned weights, and with averages: every command uses the weights that were trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from jax import export as jax_export
from safetensors.numpy import load_file

from meshpar.checkpoint.checkpoints import checkpoints
from meshpar.checkpoint.saved import Checkpoint
from meshpar.convert import on_one_device, trained
from meshpar.data import Synthetic
from meshpar.experiment.config import Precision, Run
from meshpar.mesh.layout import MeshLayout
from meshpar.models import Llama
from meshpar.nn.experts import Balance, Experts
from meshpar.nn.lora import LoRA
from meshpar.optim import AdamW
from meshpar.optim.pruning import Magnitude
from meshpar.parallel.strategies import Parallel
from meshpar.serve.open_engine import open_engine
from meshpar.serve.paged_decoding import PagedDecoding
from meshpar.serve.sampling import Sampling
from meshpar.serve.scheduler import Capacity, Request
from meshpar.serve.source import Source, open_source
from meshpar.sharding.rules import AxisRules
from meshpar.train.loss import Distill
from meshpar.train.program import structs
from meshpar.train.state import TrainState
from meshpar.tree import flatten_with_paths, map_with_path
from tests.interop.pretrained import logits
from tests.serving import served

VOCAB = 32
PROMPT = "3 1 4 1 5"
UP = "blocks.mlp.up.kernel"
KINDS = {
    "lora": {"lora": LoRA(rank=2, paths=("blocks.**",))},
    "pruned": {"prune": Magnitude(sparsity=0.5, every=1, times=2)},
    "ema": {"optim": AdamW(lr=1e-2, ema=0.9)},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A folder with a run of each kind. Its checkpoint has updates and zeros as training makes them."""
    folder = tmp_path_factory.mktemp("runs")
    for kind, settings in KINDS.items():
        run = Run(
            model=Llama(num_layers=2, hidden_size=16, num_heads=2, intermediate_size=32, vocab_size=VOCAB),
            data=Synthetic(batch_size=8, seq_len=16, vocab_size=VOCAB),
            mesh=MeshLayout(data=2, fsdp=2, tensor=2),
            rules=AxisRules(preset=("fsdp", "megatron")),
            run_dir=folder / kind,
            num_steps=2,
            **{"optim": AdamW(lr=1e-2)} | settings,
        )
        prepared = on_one_device(run)
        about = replace(prepared.about, config=run.model_dump(mode="json"))
        with checkpoints(folder / kind / "checkpoints", about=about) as saved:
            saved.save(2, after_training(kind, prepared.placement.structs))
    return folder


def after_training(kind: str, abstract: TrainState) -> TrainState:
    """A state with random parameters, of which half are pruned, or which have another average."""
    rng = np.random.default_rng(0)

    def drawn(path: str, struct: jax.ShapeDtypeStruct) -> jax.Array:
        weights = rng.normal(size=struct.shape).astype(struct.dtype) / 4
        is_pruned = kind == "pruned" and path.startswith("blocks.") and path.endswith("kernel")
        is_small = abs(weights) < np.median(abs(weights))
        return jnp.asarray(np.where(is_pruned & is_small, 0, weights))

    params = map_with_path(drawn, abstract.params)
    state = replace(jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), abstract), params=params)
    if kind != "ema":
        return state
    return replace(state, opt_state=state.opt_state._replace(ema=map_with_path(drawn, abstract.params)))


def decoding_of(opened: Source) -> PagedDecoding:
    dtype = np.dtype(opened.run.precision.params)
    ctx = opened.ctx
    return PagedDecoding(model=opened.model, ctx=ctx, dtype=dtype, capacity=Capacity(num_shards=ctx.shards("batch")))


def on_mesh(run_dir: Path) -> tuple[dict[str, jax.Array], dict[str, jax.ShapeDtypeStruct]]:
    """The parameters that generate tokens on the run's mesh, and how they should be placed."""
    opened = open_source(run_dir)
    placed = structs(decoding_of(opened).params)
    return flatten_with_paths(opened.restore(placed)), flatten_with_paths(placed)


@pytest.mark.parametrize("kind", ["lora", "ema"])
def test_updates_of_lora_are_added_and_averages_replace_parameters(kind, runs):
    saved = Checkpoint(runs / kind / "checkpoints/2")
    raw = saved.on_host(f"params.{UP}")
    if kind == "lora":
        a, b = (saved.on_host(f"params.blocks.mlp.up.lora.{name}") for name in "ab")
        want = raw + 8 * (a @ b)
    else:
        want = saved.on_host(f"opt_state.ema.{UP}")
    _, on_one, _ = trained(runs / kind)
    got, placed = on_mesh(runs / kind)
    assert abs(want - raw).max() > 0.1
    assert abs(np.asarray(on_one[UP]) - want).max() < 1e-6
    assert abs(np.asarray(got[UP]) - want).max() < 1e-6
    assert {*got} == {*on_one} == {*placed}
    assert all(x.sharding == placed[path].sharding and x.dtype == placed[path].dtype for path, x in got.items())
    assert not got[UP].sharding.is_fully_replicated


def test_codes_of_pruned_weights_are_zero(runs, command, tmp_path):
    assert command("compress", runs / "pruned", tmp_path / "small", "--weights", "int8", "--group", "8").code == 0
    _, weights, _ = trained(runs / "pruned")
    run, compressed, _ = trained(tmp_path / "small")
    assert run.prune is None
    kernels = [path for path in weights if path.startswith("blocks.") and path.endswith("kernel")]
    for path in kernels:
        is_zero = np.asarray(weights[path]) == 0
        assert is_zero.mean() >= 0.5
        assert (np.asarray(compressed[f"{path}.codes"])[is_zero] == 0).all()
    assert len(kernels) == 7


TRAINED_ON_A_MESH = {
    "local updates": {"parallel": Parallel(local={"every": 2}), "mesh": MeshLayout(replica=2)},
    "a pipeline": {
        "parallel": Parallel(pipeline={"kind": "1f1b", "num_microbatches": 4}),
        "mesh": MeshLayout(pipe=2),
        "rules": AxisRules(preset=("pipeline",)),
    },
    "a teacher that is gone": {"distill": Distill(teacher=Path("removed"))},
}


@pytest.mark.parametrize("case", TRAINED_ON_A_MESH)
def test_strategies_of_training_are_not_needed_to_read_a_run(case, runs):
    run = open_source(runs / "pruned").run.model_copy(update=TRAINED_ON_A_MESH[case])
    assert {*flatten_with_paths(on_one_device(run).placement.params)} == {*trained(runs / "pruned")[1]}


def test_generation_stores_the_bias_of_a_router_as_training_does(runs):
    run = open_source(runs / "pruned").run
    experts = Experts(num=4, per_token=2, intermediate_size=8, balance=Balance(kind="bias"))
    update = {
        "model": run.model.model_copy(update={"experts": experts}),
        "precision": Precision(params="bfloat16", compute="bfloat16"),
    }
    run = run.model_copy(update=update)
    generated = flatten_with_paths(decoding_of(replace(open_source(runs / "pruned"), run=run)).params)
    stored = flatten_with_paths(on_one_device(run).placement.params)
    assert {path: p.spec for path, p in generated.items()} == {path: p.spec for path, p in stored.items()}
    assert generated["blocks.mlp.router.bias"].spec.dtype == np.float32


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_command_uses_the_trained_weights(kind, runs, command, tmp_path):
    run = runs / kind
    opened = open_source(run)
    prompt = opened.encode(PROMPT)
    assert command("convert", run, "--to-hf", tmp_path / "hf").code == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager").eval()
    tokens = list(prompt)
    for _ in range(6):
        tokens.append(int(logits(model, [tokens])[0, -1].argmax()))
    answer = tokens[len(prompt) :]

    generated = command("generate", run, "--prompt", PROMPT, "--max-tokens", "6", "--json")
    assert generated.code == 0
    assert json.loads(generated.out)["completions"][0]["tokens"] == answer

    engine = open_engine(opened, slots=2, max_len=16, page_size=4, chunk=4)
    assert served(engine, [Request(prompt=prompt, max_tokens=6, sampling=Sampling())]) == [answer]

    assert command("export", run, tmp_path / "stablehlo").code == 0
    program = jax_export.deserialize(bytearray((tmp_path / "stablehlo/model.jax").read_bytes()))
    arrays = load_file(tmp_path / "stablehlo/model.safetensors")
    got = program.call(arrays, np.asarray([tokens], np.int32))
    assert abs(got - logits(model, [tokens])).max() < 1e-5
