"""Each strategy of the manual lowering, for models that are no decoders of meshpar's.

A strategy that does not round equals plain JAX and the user's own loss on one device; one that rounds fulfils the law
of its rounding. `tests/docs/matrix.py` writes the table of these tests into the reference.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import flax.linen as nn
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import onnxruntime
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from safetensors.numpy import load_file

from meshpar import ConfigError, Parallel, Reduce, ShardingError, averaged, export, inspect, plan, training, verify
from meshpar.collectives.algorithms import ALGORITHMS
from meshpar.cost.flops import flops, traced_products
from meshpar.cost.traced import traced_collectives, traffic
from meshpar.experiment.config import Precision
from meshpar.experiment.prepare import prepare
from meshpar.export import onnx_graph
from meshpar.export.forward import Exportable
from meshpar.inspection.contract import Contract
from meshpar.interop import user_code
from meshpar.mesh.layout import MeshLayout
from meshpar.optim import AdamW
from meshpar.parallel import quantized
from meshpar.parallel.context import prefetch_option
from meshpar.partition.rules import derivatives
from meshpar.train.error_feedback import REDUCE
from meshpar.train.program import shardings, with_rows
from meshpar.train.state import OWN
from meshpar.tree import flatten_with_paths, map_with_path, matching
from meshpar.verification.trial import QUICK
from tests.comparison import largest_difference
from tests.equivalence import test_zoo as zoo_tests
from tests.equivalence.planned import AXES, NAMES, run_of
from tests.equivalence.strategies import (
    KERNELS,
    RATE,
    ROWS,
    adopted,
    batches,
    by_hand,
    difference,
    mean_of,
    model,
    plain_gradient,
    plain_loss,
    trained,
)
from tests.zoo import gshard, t5, vit
from tests.zoo.parts import SEQ

EXACT = 1e-10


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def equals(name: str, layout: str, expected: Any = None, **options: Any) -> float:
    """How far the losses and parameters of two steps are from those by hand."""
    losses, state = trained(adopted(name, layout, **options), name)
    return difference((losses, state.params), expected or by_hand(name))


# Reductions ---------------------------------------------------------------------------------------------------------


def reduction(name):
    reduce = Reduce(algorithm="ring", bucket_bytes="3KiB")
    assert equals(name, "cube", parallel=Parallel(gradient_reduction=reduce)) < EXACT


def reduction_in_int8(name):
    """n devices cut P elements into parts of ceil(P / (n x block)) blocks, each with a float32 scale. A device sends
    a part to each other one twice: to sum it, and to gather the sums."""
    made = adopted(name, "data8", parallel=Parallel(gradient_reduction=Reduce(across="int8")), accum_dtype=np.float32)
    sums = {True: 0, False: 0}
    for one in inspect(made.compile_step(QUICK).compiled, made.mesh).collectives:
        sums[one.kind == "all_reduce"] += one.times * one.sent_bytes
    elements = sum(x.size for x in jax.tree.leaves(model(name)[1]))
    n, block, scale = 8, 256, 4
    assert sums[False] == 2 * (n - 1) * -(-elements // (n * block)) * (block + scale)
    assert sums[True] < 100  # the loss, its count, metrics and the norm
    exact = 2 * Fraction(n - 1, n) * 4 * elements
    assert sums[False] / exact <= Fraction(block + scale, 4 * block) * (1 + Fraction(n * block, elements))


def error_feedback(kind, name):
    """What is sent, and what the devices keep for the next step, are together the exact sum of the gradients."""
    made = adopted(name, "data4", parallel=Parallel(gradient_reduction=Reduce(across=kind)))
    (batch, *_) = batches(name, 1)
    state = made.compile_init()()
    found = jax.device_get(
        jax.jit(made.gradients)(state.params, with_rows(made.put(batch)), np.int32(0), state.carried)
    )
    exact = plain_gradient(name)(model(name)[1], batch)[1]
    lost = jax.tree.map(lambda x: np.sum(x, 0), found.carried[REDUCE]["lost"])
    both = jax.tree.map(lambda grad, error: grad + error / found.tokens, found.grads, lost)
    rounding = np.finfo(np.float32).eps * max(np.abs(grad).max() for grad in jax.tree.leaves(exact))
    assert difference(both, exact) < rounding < difference(found.grads, exact) / 1e3  # errors are stored in float32


# Local updates ------------------------------------------------------------------------------------------------------


def in_slices(name: str, after: Callable[[int, list[Any]], list[Any]], num_steps: int) -> list[Any]:
    """The parameters of two slices that train alone, on the rows of theirs.

    Args:
      after: (step, the slices' parameters) -> these after the step.
    """
    slices = [model(name)[1]] * 2
    for index, batch in enumerate(batches(name, num_steps), 1):
        for i in range(2):
            rows = {key: x[i * ROWS // 2 : (i + 1) * ROWS // 2] for key, x in batch.items()}
            slices[i] = jax.device_get(
                jax.tree.map(lambda p, g: p - RATE * g, slices[i], plain_gradient(name)(slices[i], rows)[1])
            )
        slices = after(index, slices)
    return slices


def local(name: str, num_steps: int, **settings: Any) -> Any:
    """The parameters after a training with local updates over the axis replica."""
    parallel = Parallel(local={"axis": "replica", **settings})
    return trained(adopted(name, "hsdp", parallel=parallel, num_steps=num_steps), name, num_steps)[1].params


def local_sgd(name):
    def after(step, slices):
        return [mean_of(slices)] * 2 if step == 2 else slices

    assert difference(local(name, 2, every=2), in_slices(name, after, 2)[0]) < EXACT


def diloco(name):
    shared, momentum = [model(name)[1]], [jax.tree.map(np.zeros_like, model(name)[1])]

    def after(step, slices):
        if step % 2:
            return slices
        gradient = jax.tree.map(lambda p, mean: p - mean, shared[-1], mean_of(slices))
        momentum.append(jax.tree.map(lambda m, g: 0.9 * m + g, momentum[-1], gradient))
        shared.append(jax.tree.map(lambda p, m, g: p - 0.7 * (0.9 * m + g), shared[-1], momentum[-1], gradient))
        return [shared[-1]] * 2

    assert difference(local(name, 4, every=2, outer="nesterov"), in_slices(name, after, 4)[0]) < EXACT


def turn(at: int, path: str) -> Any:
    """Where the fragment `at` of two has a part: every second layer, of a stack or numbered; the last has the rest."""
    if "encoderblock" in path:
        return slice(at, None, 2)
    number = re.search(r"_(\d)\.", path)
    return slice(None) if at == (int(number[1]) if number else 1) else slice(0)


def diloco_in_fragments(name):
    """Every second layer, and the others with all that is no layer, end their rounds in turn."""
    shared = dict(flatten_with_paths(model(name)[1]))
    momentum = {path: np.zeros_like(x) for path, x in shared.items()}

    def after(step, slices):
        at = (step - 1) % 2
        mean = flatten_with_paths(mean_of(slices))
        for path in shared:
            part = turn(at, path)
            difference = shared[path][part] - mean[path][part]
            momentum[path][part] = 0.9 * momentum[path][part] + difference
            shared[path] = shared[path].copy()
            shared[path][part] -= 0.7 * (0.9 * momentum[path][part] + difference)
        return [map_with_path(partial(_synchronized, at, shared), one) for one in slices]

    slices = in_slices(name, after, 4)
    found = local(name, 4, every=2, outer="nesterov", fragments=2)
    assert difference(found, map_with_path(lambda path, x: shared[path], slices[0])) < EXACT
    assert {at for path in shared for at in (0, 1) if shared[path][turn(at, path)].size} == {0, 1}


def _synchronized(at, shared, path, x):
    x, part = x.copy(), turn(at, path)
    x[part] = shared[path][part]
    return x


# Numbers ------------------------------------------------------------------------------------------------------------


def microbatches(name):
    assert equals(name, "cube", by_hand(name, parts=2), num_microbatches=2) < EXACT


def compute_in_bfloat16(name):
    losses, _ = trained(adopted(name, "cube", compute_dtype=jnp.bfloat16), name)
    expected, _ = by_hand(name)
    assert EXACT < largest_difference(losses, expected) < 0.05 * max(expected)


def master_copy(name):
    def narrowed(params, batch):
        return plain_loss(name)(jax.tree.map(lambda p: p + jax.lax.stop_gradient(_narrow(p) - p), params), batch)

    first = jax.tree.map(_narrow, model(name)[1])
    made = adopted(name, "cube", params_dtype=jnp.float32, master_dtype=jnp.float64, accum_dtype=np.float64)
    _, state = trained(made, name)
    assert difference(state.opt_state.master, by_hand(name, loss=narrowed, params=first)[1]) < EXACT
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {np.dtype("float32")}


def stored_in_bfloat16(name):
    """Shards are gathered in the dtype in which the loss computes, and updated in the one in which they are stored."""
    losses, state = trained(adopted(name, "cube", params_dtype=jnp.bfloat16), name, 1)
    narrow = jax.tree.map(lambda p: np.float64(p.astype(jnp.bfloat16)), model(name)[1])
    assert abs(losses[0] - by_hand(name, 1, params=narrow)[0][0]) < EXACT
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.bfloat16)}


def _narrow(x):
    return x.astype(np.float32).astype(np.float64)


def products_in(number_format, name):
    one, whole = (trained(adopted(name, layout, number_format=number_format), name) for layout in ("one", "cube"))
    assert difference((one[0], one[1].params), (whole[0], whole[1].params)) < EXACT
    assert EXACT < largest_difference(one[0], by_hand(name)[0]) < 0.05 * max(one[0])


# What is trained ----------------------------------------------------------------------------------------------------


def lora(name, layout="cube", **keys):
    settings = {"rank": 2, "alpha": 4, "paths": KERNELS[name]} | keys
    made = adopted(name, layout, lora=settings, tx=optax.sgd(RATE))
    # `b` begins at zero, so the gradient of `a` is zero in the first step, and not in the second.
    start = jax.device_get(made.compile_init()().params)
    _, state = trained(made, name)

    def merged(trained, batch):
        scale = 4 / settings["rank"] ** (0.5 if keys else 1)
        return plain_loss(name)(_merged(_with(start, trained), scale), batch)

    first = {path: x for path, x in flatten_with_paths(start).items() if ".lora." in path}
    assert any(path.endswith(".magnitude") for path in first) == bool(keys)
    _, expected = by_hand(name, loss=merged, params=first)
    assert difference(state.params, _with(start, expected)) < EXACT
    assert all(difference(first[path], x) > EXACT for path, x in expected.items())


def dora(name, layout="cube"):
    """Also with a rank by a pattern, and with the scale alpha / sqrt(rank)."""
    lora(name, layout, rank=3, rank_pattern={"**": 3}, use_rslora=True, use_dora=True)


def _with(tree, leaves):
    return map_with_path(lambda path, x: leaves.get(path, x), tree)


def _merged(tree, scale):
    """The kernels, stacks of matrices or single ones, with `scale` times their updates, and the norms of DoRA."""
    merged = {}
    for name, child in tree.items():
        if name != "lora":
            merged[name] = _merged(child, scale) if isinstance(child, dict) else child
    for name, update in tree.get("lora", {}).items():
        a, b = update["a"], update["b"]
        columns = b.reshape(*b.shape[: a.ndim - 1], -1)
        own = merged[name].reshape((a @ columns).shape)
        changed = own + scale * (a @ columns)
        if "magnitude" in update:
            norm, norm_changed = (jnp.linalg.norm(x, axis=-2, keepdims=True) for x in (own, changed))
            norms = norm + update["magnitude"].reshape(norm.shape)
            changed = changed * norms / jax.lax.stop_gradient(norm_changed)
        merged[name] = changed.reshape(merged[name].shape)
    return merged


def frozen(name):
    glob = KERNELS[name][0] + "**"
    paths = {*matching(flatten_with_paths(model(name)[1]), glob)}
    assert paths
    _, state = trained(adopted(name, "cube", freeze=glob), name)

    def without(params, batch):
        held = map_with_path(lambda path, x: jax.lax.stop_gradient(x) if path in paths else x, params)
        return plain_loss(name)(held, batch)

    assert difference(state.params, by_hand(name, loss=without)[1]) < EXACT


def average(name):
    _, state = trained(adopted(name, "cube", ema=0.5), name)
    first, second = (by_hand(name, num)[1] for num in (1, 2))
    expected = jax.tree.map(lambda p, q: (0.5 * p + q) / 1.5, first, second)
    assert difference(averaged(state), expected) < EXACT


def pruning(name):
    prune = {"kind": "magnitude", "sparsity": 0.5, "every": 1, "times": 1, "paths": [KERNELS[name][0] + "**"]}
    one, whole = (trained(adopted(name, layout, prune=prune, num_steps=2), name)[1] for layout in ("one", "cube"))
    assert difference(one.params, whole.params) < EXACT
    masks = [x for path, x in flatten_with_paths(whole.opt_state.masks).items()]
    assert masks and all(mask.mean() == 0.5 for mask in masks)


def offloaded_optimizer(name):
    tx = optax.sgd(RATE, momentum=0.9)
    on_host, on_device = (adopted(name, "cube", tx, offload_optimizer=is_offloaded) for is_offloaded in (True, False))
    kinds = {(x.size > OWN, x.sharding.memory_kind) for x in jax.tree.leaves(on_host.placement.structs.opt_state)}
    assert kinds == {(True, "pinned_host"), (False, "device")}
    assert difference(trained(on_host, name)[1].params, trained(on_device, name)[1].params) < EXACT


def meshpars_optimizer(name):
    """`tx=AdamW(...)` decays matrices only, clips and averages, as a config's optimizer does."""
    rate = 0.125  # exact in float32, the dtype of learning rates
    tx = AdamW(lr=rate, weight_decay=0.1, clip_norm=0.5)
    made = adopted(name, "cube", tx, num_steps=2)
    _, state = trained(made, name)
    decays = map_with_path(lambda path, x: x.ndim > 1 and _is_matrix(path), model(name)[1])
    plain = optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.1, mask=decays)
    )
    params = model(name)[1]
    opt_state = plain.init(params)
    for batch in batches(name, 2):
        updates, opt_state = plain.update(jax.grad(plain_loss(name))(params, batch), opt_state, params)
        params = optax.apply_updates(params, updates)
    assert difference(state.params, params) < 1e-8  # Adam divides by gradients, some of which are tiny


def _is_matrix(path):
    """T5's `rel_embedding` is multiplied by one-hot rows, so it is a matrix."""
    return not path.endswith(("bias", "scale", "cls", "pos_embedding"))


def verified(name):
    """On each axis alone, and resumed on another mesh."""
    found = verify(adopted(name, "cube"), batches(name, 2))
    assert found.is_equal and any("resumed" in row.name for row in found.rows)


# Overlap ------------------------------------------------------------------------------------------------------------

TOKENS = ROWS // 2 * SEQ * 32 * 8 * 3 // 4
"""Bytes that a device sends to gather the tokens of its rows in float64. They are 32 wide in each model."""
AGAIN = {
    ("tensor", "gshard"): 1 * TOKENS,
    ("tensor", "t5"): 10 * TOKENS,
    ("fsdp", "vit"): 2 * (4 * 2048 + 4096) + 1024,
}
"""Bytes that products in chunks send again. The gradient of each weight gathers its tokens again. Weights of ViT's
layers are gathered by the products that its `nn.remat` computes again, all but an MLP's last one, and by their
gradients; a whole weight is gathered once for both. Its head is in no loop, so a whole one is kept."""


def overlapped(field, way, name):
    """Chunks travel instead of whole arrays, with the same bytes but for what is gathered again."""
    layout = {"tensor": "sequence", "fsdp": "cube"}[field]
    made, whole = (adopted(name, layout, parallel=one) for one in (Parallel(**{field: {"overlap": way}}), Parallel()))
    step = made.compile_step(QUICK)
    losses, state = trained(made, name, step=step)
    assert difference((losses, state.params), by_hand(name)) < EXACT
    chunked = inspect(step.compiled, made.mesh)
    traced = _traced(whole)
    kinds = [[one.kind for one in found] for found in (chunked.collectives, traced)]
    assert "collective_permute" in kinds[0] and kinds[0].count("all_gather") < kinds[1].count("all_gather")
    expected = {", ".join(axes): sent for axes, sent in traffic(traced).items()}
    assert dict(chunked.bytes_per_axis) == expected | {field: expected[field] + AGAIN.get((field, name), 0)}


def _traced(made):
    return traced_collectives(jax.make_jaxpr(made.step)(made.placement.structs, made.batch | made.given))


def prefetched_weights(name):
    """An option of XLA for GPUs and TPUs; on CPUs the program is the same."""
    early, late = (adopted(name, "cube", parallel=Parallel(fsdp={"overlap": way})) for way in ("prefetch", "none"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshpar.parallel.context.platform_of", lambda mesh: "gpu")
        assert early.ctx.compiler_options == prefetch_option("gpu") != late.ctx.compiler_options


# What a step computes, keeps and sends -------------------------------------------------------------------------------


LOGITS: dict[str, Callable[..., Any]] = {
    "vit": lambda params, batch: vit.ViT().apply({"params": params}, batch["image"]),
    "t5": lambda params, batch: t5.T5().apply({"params": params}, batch["inputs"], batch["targets"]),
    "gshard": lambda params, batch: gshard.Model().apply({"params": params}, batch["tokens"])[0],
}


def distilled(name):
    """A loss that calls a teacher: the cross entropy of the student's logits under the teacher's."""
    teacher = jax.tree.map(lambda x: x + 0.1 * np.cos(np.arange(x.size).reshape(x.shape)), model(name)[1])

    def loss(params, batch, key=None):
        wanted = jax.nn.softmax(LOGITS[name](teacher, batch))
        return -jnp.mean(jnp.sum(wanted * jax.nn.log_softmax(LOGITS[name](params, batch)), -1))

    losses, state = trained(adopted(name, "cube", loss=loss), name)
    assert difference((losses, state.params), by_hand(name, loss=loss)) < EXACT


def remat_by_names(name):
    """What a policy names is saved: the backward computes fewer products again."""

    def naming(call, args, kwargs, context):
        x = call(*args, **kwargs)
        return checkpoint_name(x, "dense") if isinstance(context.module, nn.Dense | nn.DenseGeneral) else x

    def loss(*saved):
        def named(*arguments):
            with nn.intercept_methods(naming):
                return model(name)[0].loss(*arguments)

        return jax.checkpoint(named, policy=jax.checkpoint_policies.save_only_these_names(*saved))

    some = adopted(name, "cube", loss=loss("dense"))
    losses, state = trained(some, name)
    assert difference((losses, state.params), by_hand(name)) < EXACT
    counted = [inspect(one.compile_step(QUICK).compiled).flops for one in (some, adopted(name, "cube", loss=loss()))]
    assert counted[0] < counted[1]


def evaluated(name):
    made = adopted(name, "cube")
    (batch,) = batches(name, 1)
    found = jax.device_get(made.compile_evaluation()(made.compile_init(QUICK)().params, made.put(batch), {}))
    expected = float(plain_loss(name)(model(name)[1], batch))
    assert abs(found["loss"] / found["tokens"] - expected) < EXACT


def exported(name):
    """A program of any number of rows, in the dtypes that the model computes in, beside the parameters by path."""
    _, state = trained(adopted(name, "cube"), name, 1)
    (batch,) = batches(name, 1)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "made"
        export.function(LOGITS[name], state.params, batch, folder)
        program = jax.export.deserialize(bytearray((folder / "model.jax").read_bytes()))
        arrays = load_file(folder / "model.safetensors")
    for rows in (ROWS, ROWS // 4):
        given = {key: x[:rows] for key, x in batch.items()}
        assert largest_difference(program.call(arrays, given), LOGITS[name](state.params, given)) < EXACT
    path = max(arrays, key=lambda path: arrays[path].size)
    assert (
        largest_difference(program.call(arrays | {path: 0 * arrays[path]}, batch), program.call(arrays, batch)) > EXACT
    )


def exported_to_onnx(name):
    """A graph of any number of rows, which ONNX Runtime computes in float32."""
    with jax.enable_x64(False), TemporaryDirectory() as temporary:
        params = jax.tree.map(np.float32, model(name)[1])
        (batch,) = [{key: _narrowed(x) for key, x in one.items()} for one in batches(name, 1)]

        def of_paths(arrays, batch):
            return LOGITS[name](map_with_path(lambda path, _: arrays[path], params), batch)

        structs = {key: jax.ShapeDtypeStruct(x.shape, x.dtype) for key, x in batch.items()}
        onnx_graph.convert(Exportable(of_paths, flatten_with_paths(params), structs), Path(temporary) / "model.onnx")
        session = onnxruntime.InferenceSession(f"{temporary}/model.onnx")
        for rows in (ROWS, ROWS // 4):
            given = {key: x[:rows] for key, x in batch.items()}
            (found,) = session.run(["output"], {one.name: given[one.name] for one in session.get_inputs()})
            assert largest_difference(found, jax.device_get(LOGITS[name](params, given))) < 1e-5
        other = jax.tree.map(lambda x: 0.9 * x, params)
        assert largest_difference(found, jax.device_get(LOGITS[name](other, given))) > 1e-3


def _narrowed(x):
    return x.astype(np.float32 if x.dtype.kind == "f" else np.int32)


def planned(name):
    """Over each axis that can divide the model; the best layouts are traced, so they are ones that train."""
    for target in (NAMES[name], f"loss_of_{name}", "rows_of"):
        user_code.permit(f"tests.equivalence.planned:{target}", None)
    found = plan(run_of(name), "h100:1x4", fix=["num_microbatches=1"]).found
    assert {axis for layout in found.rough for axis in layout.mesh} == {"data", "fsdp", "tensor"} | AXES[name]
    for one in found.ranked:
        assert {axis for sent in (*one.work.waits, *one.work.beside) for axis in sent.axes} == {*one.layout.mesh}


def contract(name):
    """A contract holds the compiled step to the bytes of the traced one; it computes no more FLOPs."""
    made = adopted(name, "cube")
    step = jax.make_jaxpr(made.step)(made.placement.structs, made.batch | made.given)
    traced = traffic(traced_collectives(step, 4))
    found = inspect(made.compile_step(QUICK).compiled, made.mesh)
    limits = {",".join(axes): "traced" for axes in traced}
    assert not Contract(bytes_per_axis=limits).check(found, traced, 1).found
    assert Contract(all_gather=0).check(found, traced, 1).found
    assert 0 < found.flops <= sum(flops(traced_products(step), made.mesh.size).values())


STRATEGIES: dict[str, tuple[Callable[[str], None], str | None]] = {
    "declared reduction": (reduction, "gshard"),
    "reduction in int8": (reduction_in_int8, "gshard"),
    "reduction in 1 bit": (partial(error_feedback, "onebit"), "gshard"),
    "reduction by PowerSGD": (partial(error_feedback, "powersgd"), "gshard"),
    "local SGD": (local_sgd, "vit"),
    "DiLoCo": (diloco, "gshard"),
    "microbatches": (microbatches, "vit"),
    "compute in bfloat16": (compute_in_bfloat16, "gshard"),
    "master copy": (master_copy, "gshard"),
    "products in int8": (partial(products_in, "int8"), "vit"),
    "products in fp8": (partial(products_in, "fp8"), "gshard"),
    "LoRA": (lora, None),
    "frozen by path": (frozen, "gshard"),
    "average of parameters": (average, "gshard"),
    "pruning": (pruning, "gshard"),
    "optimizer on the host": (offloaded_optimizer, "gshard"),
    "optimizer of a config": (meshpars_optimizer, "gshard"),
    "verify and resume": (verified, "gshard"),
    "overlap of weights, in a ring": (partial(overlapped, "fsdp", "ring"), "gshard"),
    "overlap of tokens, in both directions": (partial(overlapped, "tensor", "bidirectional"), "gshard"),
    "overlap of weights, in both directions": (partial(overlapped, "fsdp", "bidirectional"), "gshard"),
    "prefetch of weights": (prefetched_weights, None),
    "overlap of tokens, in a ring": (partial(overlapped, "tensor", "ring"), "t5"),
    "evaluation": (evaluated, None),
    "distillation, by a loss": (distilled, "gshard"),
    "contract of bytes": (contract, None),
    "export to StableHLO": (exported, "gshard"),
    "plan over its axes": (planned, None),
    "recomputation by names": (remat_by_names, "gshard"),
    "DiLoCo in fragments": (diloco_in_fragments, "gshard"),
    "stored in bfloat16": (stored_in_bfloat16, None),
    "DoRA": (dora, "gshard"),
    "export to ONNX": (exported_to_onnx, None),
}
"""Strategy -> its test, and the model, if any, with which CI tries every second one."""
MODELS = ("vit", "t5", "gshard")
NO_PRODUCT = "no product of the loss has an activation and a parameter"
REFUSED = {
    **{("gshard", f"products in {name}"): NO_PRODUCT for name in ("int8", "fp8")},
    **{("vit", f"overlap of tokens, in {way}"): "activation_dims" for way in ("a ring", "both directions")},
}
"""What is refused, and a part of the message."""
WHY = {
    NO_PRODUCT: "all that it multiplies with are experts, a router and an output projection, which are not rounded in "
    "meshpar's own models either",
    "activation_dims": "rows of pictures have no dim of a sequence that `megatron_sp` could shard",
}
"""The part of the message -> why, for the guide."""


def cases():
    for i, (strategy, (_, sampled)) in enumerate(STRATEGIES.items()):
        for name in MODELS:
            marks = [] if name == sampled and i % 2 else [pytest.mark.slow]
            yield pytest.param(name, strategy, marks=marks, id=f"{name}-{strategy}".replace(" ", "_"))


@pytest.mark.parametrize(("name", "strategy"), list(cases()))
def test_a_strategy_acts_as_its_theory_says(name, strategy):
    check = STRATEGIES[strategy][0]
    if (name, strategy) not in REFUSED:
        check(name)
        return
    with pytest.raises((ConfigError, ShardingError), match=REFUSED[name, strategy]):
        check(name)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data8", "expert4"])
def test_dora_on_other_meshes_is_that_by_hand(layout):
    dora("gshard", layout)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "auto"])
def test_each_algorithm_is_equal_to_one_device(algorithm):
    reduce = Reduce(algorithm=algorithm, bucket_bytes="3KiB")
    assert equals("gshard", "data8", parallel=Parallel(gradient_reduction=reduce)) < EXACT


def test_an_overlap_that_no_product_has_is_refused():
    def loss(params, batch, key):
        return jnp.mean(jnp.square(batch["x"] * params["scale"]))

    made = training(
        lambda key: {"scale": jnp.ones(8)}, loss, optax.sgd(RATE), {"x": np.ones((ROWS, 8))}, mesh="fsdp=8",
        rules={"preset": ["fsdp"]}, dims={"scale": ("embed",)}, parallel=Parallel(fsdp={"overlap": "ring"}),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"parallel.fsdp.overlap\n    no product of the loss .*\n    parallel.fsdp"):
        _ = made.activations


def test_a_mixture_written_with_one_hots_sends_tokens_to_experts_alone():
    """GShard's all-to-all: each device sends all but its own experts' places, and their gradients come back."""
    made = adopted("gshard", "expert4")
    found = inspect(made.compile_step(QUICK).compiled, made.mesh).collectives
    sent = sum(one.full_bytes * one.times for one in found if one.kind == "all_to_all") * 3 / 4
    groups, experts, layers, choices, itemsize = ROWS // 4, gshard.EXPERTS, 2, 2, 8
    tokens = experts * groups * gshard.CAPACITY * gshard.WIDTH * itemsize  # [expert, group, place, width]
    masks = choices * groups * SEQ * experts * itemsize  # [group, token, expert], which have no gradient
    assert sent == layers * (2 * tokens + masks) * 3 / 4


LLAMAS = [
    ("int8", zoo_tests.CUBE),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [("int8", "fsdp8"), ("fp8", "tensor4_sp")]),
]


@pytest.mark.parametrize(("number_format", "layout"), LLAMAS)
def test_a_plain_llama_rounds_as_meshpars_own_does(number_format, layout):
    zoo, params, _, expected = zoo_tests.on_one_device("llama")
    run = zoo_tests.own_llama(MeshLayout(), ["replicated"]).run
    precision = Precision(params="float64", compute="float64", matmul=number_format)
    own = prepare(run.model_copy(update={"precision": precision}), run.mesh.build(jax.devices()[:1]))
    column = np.broadcast_to(np.arange(zoo_tests.SEQ, dtype=np.int32), (ROWS, zoo_tests.SEQ))
    batch = with_rows(dict(zoo.batch) | {"positions": column, "segments": np.ones_like(column)})
    want = jax.jit(own.gradients)(zoo_tests.as_own(params), batch, np.int32(0), {})
    plain = zoo_tests.adopted(zoo, layout, "manual").on(number_format=number_format)
    placed = jax.device_put(params, shardings(plain.placement.structs.params))
    got = jax.jit(plain.gradients)(placed, with_rows(plain.put(dict(zoo.batch))), np.int32(0), {})
    assert largest_difference((got.loss, zoo_tests.as_own(got.grads)), (want.loss, want.grads)) < EXACT
    assert largest_difference(want.grads, zoo_tests.as_own(expected.grads)) > EXACT


# Planted faults -----------------------------------------------------------------------------------------------------


def test_planted_gradients_that_are_summed_over_slices_are_seen(monkeypatch):
    monkeypatch.setattr(derivatives, "_copies", lambda scope, layout: tuple(sorted(layout.varies - layout.used)))
    with pytest.raises(AssertionError):
        local_sgd("gshard")


@pytest.mark.slow
def test_planted_scales_of_shards_alone_are_seen(monkeypatch):
    right = quantized.largest
    monkeypatch.setattr(quantized, "largest", lambda x, dims, axes: right(x, dims, ()))
    with pytest.raises(AssertionError):
        products_in("int8", "vit")
