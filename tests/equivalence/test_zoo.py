"""The theorem for public models: what they compute on any mesh is what Flax computes on one device."""

from __future__ import annotations

import time
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar import AxisRules, MeshLayout, inspect, training
from meshpar.data import Synthetic
from meshpar.experiment.config import Precision, Run
from meshpar.experiment.prepare import Prepared, prepare
from meshpar.models import Llama
from meshpar.optim import SGD
from meshpar.train.program import shardings
from meshpar.train.state import TrainState
from meshpar.train.step import with_rows
from meshpar.train.training import Training, step_key
from meshpar.tree import flatten_with_paths
from meshpar.verification.trial import QUICK, Trial
from tests import zoo as package
from tests.comparison import largest_difference
from tests.zoo import MODELS, Zoo, llama
from tests.zoo.parts import ROWS, SEQ, VOCAB
from tests.zoo.reference import Reference, first, moved, reference, without_keys

# name -> (sizes of the mesh, presets, further rules).
LAYOUTS: dict[str, tuple[dict[str, int], list[str], dict[str, tuple[str, ...]]]] = {
    "data8": ({"data": 8}, ["replicated"], {}),
    "fsdp8": ({"fsdp": 8}, ["fsdp"], {}),
    "zero1": ({"fsdp": 8}, ["zero1"], {}),
    "zero2": ({"fsdp": 8}, ["zero2"], {}),
    "hsdp2x4": ({"replica": 2, "fsdp": 4}, ["hsdp"], {}),
    "tensor4": ({"tensor": 4}, ["megatron"], {}),
    "tensor4_sp": ({"tensor": 4}, ["megatron_sp"], {}),
    "data2_fsdp2_tensor2": ({"data": 2, "fsdp": 2, "tensor": 2}, ["fsdp", "megatron"], {}),
    "data2_fsdp2_tensor2_sp": ({"data": 2, "fsdp": 2, "tensor": 2}, ["fsdp", "megatron_sp"], {}),
    "data2_tensor4_sp": ({"data": 2, "tensor": 4}, ["megatron_sp"], {}),
    "fsdp4_tensor2_zero1": ({"fsdp": 4, "tensor": 2}, ["zero1", "megatron"], {}),
    "fsdp2_tensor4_zero2": ({"fsdp": 2, "tensor": 4}, ["zero2", "megatron_sp"], {}),
    "replica2_fsdp2_tensor2": ({"replica": 2, "fsdp": 2, "tensor": 2}, ["hsdp", "megatron"], {}),
}
LOWERINGS: dict[str, dict[str, Any]] = {"manual": {}, "auto": {"lowering": "auto"}}
"""Arguments of `training` for each lowering."""
CUBE = "data2_fsdp2_tensor2"
IN_TURN = {(model, list(LAYOUTS)[i % len(LAYOUTS)]) for i, model in enumerate(MODELS) if i % 6 == 1}
SAMPLE = {"manual": IN_TURN | {(model, CUBE) for model in [*MODELS][::8]}, "auto": {*sorted(IN_TURN)[:1]}}
"""Three axes for every eighth model, and a layout in turn for every sixth. The other cases are slow tests."""
XLA = AssertionError, "XLA partitions a convolution wrongly, also in a plain jit: see the last tests"
CUBES = ("data2_fsdp2_tensor2", "data2_fsdp2_tensor2_sp", "replica2_fsdp2_tensor2")
KNOWN = {f"{model}-{layout}-auto": XLA for model in ("resnet", "unet", "vqvae", "cnn_nnx") for layout in CUBES}
ROWS_AND_TENSOR = (*CUBES, "data2_tensor4_sp", "fsdp4_tensor2_zero1", "fsdp2_tensor4_zero2")
KNOWN |= {f"convnext-{layout}-auto": XLA for layout in ROWS_AND_TENSOR}
"""Cases that fail, and why."""
ABORTED = {f"fnet-{layout}-auto" for layout in ("fsdp8", "zero2", "hsdp2x4")}
"""Cases in which XLA ends the process, because a dim of an FFT is sharded."""
ZERO = ("key.bias", "middle.k.bias", "token_mixing.Dense_1.bias", "conv2.bias.value")
"""Paths of parameters whose gradients are zero: a softmax or a norm that follows ignores them."""
LEARNING_RATE = 0.1


def cases():
    for lowering in LOWERINGS:
        for model in MODELS:
            for layout in LAYOUTS:
                slow = (model, layout) not in SAMPLE[lowering]
                name = f"{model}-{layout}-{lowering}"
                marks = [pytest.mark.slow] if slow else []
                if name in KNOWN:
                    raises, reason = KNOWN[name]
                    marks.append(pytest.mark.xfail(strict=True, raises=raises, reason=reason))
                if name in ABORTED:
                    marks.append(pytest.mark.skip(reason="XLA ends the process, because a dim of an FFT is sharded"))
                yield pytest.param(model, layout, lowering, marks=marks, id=name)


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


@lru_cache
def on_one_device(model: str) -> tuple[Zoo, Any, Any, Reference]:
    """The model, its first parameters and carried state, and what Flax computes from them."""
    zoo = MODELS[model]()
    params, carried = (moved(first(init, jax.random.key(0))) for init in (zoo.init, zoo.carried))
    key = step_key(0, np.int32(0)) if zoo.draws else None
    expected = reference(zoo, params, zoo.batch, key, carried)
    return zoo, *jax.device_get((params, without_keys(carried))), expected


def adopted(zoo: Zoo, layout: str, lowering: str) -> Training:
    sizes, presets, extra = LAYOUTS[layout]
    mesh = MeshLayout(**sizes)
    mesh = mesh.build(jax.devices()[: mesh.requested()])
    named = {name: ("batch", "seq") for name, x in zoo.batch.items() if x.ndim == 2 and x.shape[1] == SEQ}
    if not named or lowering == "auto":  # a rule for the residual stream of a sequence would be an error
        presets = ["megatron" if preset == "megatron_sp" else preset for preset in presets]
    rules = AxisRules(preset=presets, **{**zoo.rules, **extra})
    return training(
        zoo.init, zoo.loss, optax.sgd(LEARNING_RATE), dict(zoo.batch), mesh=mesh, rules=rules, dims=zoo.dims,
        batch_dims=named, carried=zoo.carried, draws=zoo.draws, compute_dtype=np.dtype("float64"),
        **LOWERINGS[lowering],
    )  # fmt: skip


def first_step(model: str, layout: str, lowering: str) -> dict[str, Any]:
    """What the first step of a training computes: kind -> tree of arrays."""
    zoo, params, carried, _ = on_one_device(model)
    trial = Trial(adopted(zoo, layout, lowering))
    opt_state = optax.sgd(LEARNING_RATE).init(params)
    state = TrainState(np.int32(0), params, opt_state, np.int32(0), carried)
    state = jax.device_put(state, shardings(trial.training.placement.structs))
    state, metrics, grads = trial._step(state, trial.training.put(dict(zoo.batch)))
    found = {"metrics": metrics, "gradients": grads, "parameters": state.params, "carried": state.carried}
    return jax.device_get(found)


def differences(found: dict[str, Any], model: str) -> dict[str, float]:
    """Kind and path of each array -> its largest difference from one device."""
    _, params, _, one = on_one_device(model)
    norm = np.sqrt(sum(np.square(g).sum() for g in jax.tree.leaves(one.grads)))
    expected = {
        "metrics": {"loss": one.loss, "grad_norm": norm, **one.metrics},
        "gradients": one.grads,
        "parameters": jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, one.grads),
        "carried": one.carried,
    }
    found = found | {"metrics": {name: found["metrics"][name] for name in expected["metrics"]}}
    want, got = flatten_with_paths(expected), flatten_with_paths(found)
    assert want.keys() == got.keys()
    return {path: float(np.abs(np.float64(x) - np.float64(got[path])).max()) for path, x in want.items()}


@pytest.mark.parametrize(("model", "layout", "lowering"), list(cases()))
def test_a_public_model_is_equal_to_one_device(model, layout, lowering):
    on_one_device(model)
    start = time.perf_counter()
    found = differences(first_step(model, layout, lowering), model)
    print(f"{model} {layout} {lowering}: {time.perf_counter() - start:.1f} s")
    assert {path: x for path, x in found.items() if not x < 1e-10} == {}


@pytest.mark.sample(4)
@pytest.mark.parametrize("model", MODELS)
def test_every_gradient_of_a_public_model_is_a_number_to_compare(model):
    _, _, _, expected = on_one_device(model)
    sizes = {path: np.abs(g).max() for path, g in flatten_with_paths(expected.grads).items()}
    assert {path: x for path, x in sizes.items() if not 1e-7 < x < 1e2 and not path.endswith(ZERO)} == {}


def test_the_zoo_knows_nothing_of_meshpar():
    files = Path(package.__file__).parent.glob("*.py")
    assert not [
        file.name for file in files if "import meshpar" in file.read_text() or "from meshpar" in file.read_text()
    ]


def own_llama(mesh: MeshLayout, presets: list[str]) -> Prepared:
    """A run of `kind: llama` with the sizes of the plain one."""
    model = Llama(
        num_layers=llama.LAYERS, hidden_size=llama.WIDTH, num_heads=llama.HEADS, num_kv_heads=llama.KV_HEADS,
        intermediate_size=llama.HIDDEN, vocab_size=VOCAB,
    )  # fmt: skip
    run = Run(
        model=model, data=Synthetic(batch_size=ROWS, seq_len=SEQ, vocab_size=VOCAB), optim=SGD(lr=LEARNING_RATE),
        mesh=mesh, rules=AxisRules(preset=presets), num_steps=1, run_dir="unused",
        precision=Precision(params="float64", compute="float64"),
    )  # fmt: skip
    return prepare(run, mesh.build(jax.devices()[: mesh.requested() or 1]))


def test_the_plain_llama_is_meshpars_own():
    """So that their bytes, memory and times can be compared."""
    zoo, params, _, expected = on_one_device("llama")
    rows = {name: np.int32(x) for name, x in zoo.batch.items()}
    column = np.broadcast_to(np.arange(SEQ, dtype=np.int32), (ROWS, SEQ))
    batch = with_rows(rows | {"positions": column, "segments": np.ones_like(column)})
    own = own_llama(MeshLayout(), ["replicated"])
    found = jax.jit(own.gradients)(as_own(params), batch, np.int32(0), {})
    assert largest_difference((found.loss, found.grads), (expected.loss, as_own(expected.grads))) < 1e-10


SENT = [pytest.param(layout, marks=[] if layout == CUBE else [pytest.mark.slow]) for layout in LAYOUTS]


@pytest.mark.slow
@pytest.mark.parametrize("layout", SENT)
def test_the_plain_llama_sends_no_more_than_meshpars_own(layout):
    sizes, presets, _ = LAYOUTS[layout]
    own = own_llama(MeshLayout(**sizes), presets)
    plain = adopted(MODELS["llama"](), layout, "manual")
    sent, most = (inspect(x.compile_step(QUICK).compiled, x.mesh).bytes_per_axis for x in (plain, own))
    assert most
    assert {axes: (n, most.get(axes, 0)) for axes, n in sent.items() if n > most.get(axes, 0)} == {}


def as_own(params):
    """The plain llama's arrays by the names of `kind: llama`."""
    return params | {"embedding": params["embedding"]["embedding"], "head": params["head"]["kernel"]}


# What XLA partitions wrongly: expected failures, which tell when they are mended ------------------------------------


def convolution(groups=1):
    dims = ("NHWC", "HWIO", "NHWC")
    return partial(
        jax.lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=dims,
        feature_group_count=groups,
    )  # fmt: skip


def difference_of_partitioned(fn, arguments, mesh, specs, out):
    """How far a plain jit on sharded arguments is from one on one device."""
    in_shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
    partitioned = jax.jit(fn, in_shardings=in_shardings, out_shardings=NamedSharding(mesh, out))
    return largest_difference(partitioned(*arguments), jax.jit(fn)(*arguments))


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="jax 0.10.2; kernels of 1 x 1 without strides are right")
def test_xla_partitions_the_gradient_of_a_convolutions_input():
    rng = np.random.default_rng(0)
    cotangent, kernel = rng.normal(size=(16, 4, 4, 64)), rng.normal(size=(3, 3, 32, 64))

    def gradient(cotangent, kernel):
        x = jax.ShapeDtypeStruct((16, 4, 4, 32), np.float64)
        return jax.linear_transpose(lambda x: convolution()(x, kernel), x)(cotangent)[0]

    mesh = MeshLayout(data=2, fsdp=2, tensor=2).build()
    rows, kernels = P(("data", "fsdp"), None, None, "tensor"), P(None, None, "fsdp", "tensor")
    assert difference_of_partitioned(gradient, (cotangent, kernel), mesh, (rows, kernels), rows) < 1e-10


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="jax 0.10.2: it is `tensor` times as large")
def test_xla_partitions_the_gradient_of_a_grouped_kernel():
    x, cotangent = np.random.default_rng(0).normal(size=(2, 16, 4, 4, 8))

    def gradient(x, cotangent):
        kernel = jax.ShapeDtypeStruct((3, 3, 4, 8), np.float64)
        return jax.linear_transpose(lambda kernel: convolution(groups=2)(x, kernel), kernel)(cotangent)[0]

    mesh = MeshLayout(data=2, tensor=4).build()
    assert difference_of_partitioned(gradient, (x, cotangent), mesh, (P("data"), P("data")), P()) < 1e-10
