"""The cores that are kernels: what they compute, count and refuse. `splash` is interpreted; `cudnn` is traced."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshpar.cost.flops import flops, needed_flops, traced_products
from meshpar.cost.walk import walk
from meshpar.data import Synthetic
from meshpar.errors import ConfigError
from meshpar.experiment.config import Precision, Run
from meshpar.experiment.prepare import prepare
from meshpar.mesh.layout import MeshLayout
from meshpar.models import Llama
from meshpar.nn.attention import Auto, Blocks, Cudnn, Reference, Splash, attend, cudnn, functional, splash
from meshpar.nn.attention import setting as shared
from meshpar.nn.attention.kernel import for_prompts
from meshpar.nn.attention.setting import Setting
from meshpar.nn.remat import Remat
from meshpar.optim import AdamW

BATCH = 1
SEQ = 256
HEADS = 2
KV_HEADS = 1
SIZE = 8
SPLASH = Splash(block_size=128, interpret=True)
ROUNDING = 64 * np.finfo("float32").eps
"""Rounding errors of a sum of 256 float32 terms grow with the root of their number, which is 16."""


def inputs(dtype="float32", seq=SEQ):
    """Queries, keys, values, and documents of which some begin within a block."""
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(BATCH, seq, n, SIZE)), dtype) for n in (HEADS, KV_HEADS, KV_HEADS)]
    return *arrays, jnp.asarray(np.sort(rng.integers(0, 3, (BATCH, seq)), axis=1), jnp.int32)


def with_gradients(attend):
    """The result of `attend(q, k, v, segments)`, and the gradients of q, k and v."""

    def weighted(q, k, v, segments):
        out = attend(q, k, v, segments)
        return (out * jnp.cos(jnp.arange(out.size, dtype=out.dtype).reshape(out.shape))).sum(), out

    def computed(q, k, v, segments):
        (_, out), grads = jax.value_and_grad(weighted, (0, 1, 2), has_aux=True)(q, k, v, segments)
        return out, *grads

    return computed


def of_core(core, window=None):
    def attend(q, k, v, segments):
        return core(q, k, v, segments, window)

    return attend


def difference(found, expected):
    """The largest difference of any array, relative to its largest element if it has one that is not 0."""
    pairs = zip(found, expected, strict=True)
    return float(np.max([jnp.abs(a - b).max() / (float(jnp.abs(b).max()) or 1.0) for a, b in pairs]))


def reference(window=None, documents=True):
    q, k, v, segments = inputs()
    return jax.jit(with_gradients(of_core(Reference(), window)))(q, k, v, segments if documents else None)


# splash ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "documents"), [(50, True), (None, False)])
def test_splash_equals_the_reference(window, documents):
    q, k, v, segments = inputs()
    found = jax.jit(with_gradients(of_core(SPLASH, window)))(q, k, v, segments if documents else None)
    assert difference(found, reference(window, documents)) < ROUNDING
    assert difference(found, reference(49, True)) > 1e-3


def test_splash_on_local_shards_equals_the_reference_on_one_device():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    computed = with_gradients(of_core(SPLASH))

    def local(*shards):
        # A loop and a checkpoint surround the layers of a model; varying types must agree in both.
        body = jax.checkpoint(lambda carry, _: (carry, computed(*carry)))
        return jax.tree.map(lambda x: x[0], jax.lax.scan(body, shards, None, length=1)[1])

    rows = [jnp.concatenate([x, x]) for x in inputs()]
    each = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data")))(*rows)
    for row in (0, 1):
        assert difference([x[row : row + 1] for x in each], reference()) < ROUNDING


def test_planted_documents_that_are_ignored_change_the_result(monkeypatch):
    monkeypatch.setattr(splash, "_both", lambda segments: None)
    out = jax.jit(of_core(SPLASH))(*inputs())
    assert difference([out], reference()[:1]) > 1e-3
    monkeypatch.undo()
    assert difference([jax.jit(of_core(SPLASH))(*inputs())], reference()[:1]) < ROUNDING


@pytest.mark.parametrize("window", [None, 1, 128, 129, 130, 257, 1000])
def test_num_pairs_equals_the_blocks_in_the_kernels_own_mask(window):
    kernel = splash._kernel(HEADS, 1024, (128, window, True), False)
    for table in (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info):
        assert np.count_nonzero(table.block_mask) == splash.num_pairs(1024, window, 128)


def traced(core, seq=SEQ, window=None, documents=True):
    q, k, v, segments = inputs(seq=seq)
    return jax.make_jaxpr(with_gradients(of_core(core, window)))(q, k, v, segments if documents else None)


def test_splash_declares_the_products_of_its_kernels():
    """Forward, gradient of queries, gradients of keys and values: nine products for each pair of blocks."""
    program = traced(SPLASH)
    counted = flops(traced_products(program))
    per_pair = 2 * BATCH * HEADS * SIZE * 128**2
    assert counted["pallas_call"] == (2 + 3 + 4) * 3 * per_pair
    # A cell of each kernel's grid, counted in its own program, has the declared number of products.
    kernels = [visit.equation for visit in walk(program) if visit.primitive == "pallas_call"]
    cells = [
        sum(p.num_flops for p in traced_products(jax.extend.core.ClosedJaxpr(kernel.params["jaxpr"], ())))
        for kernel in kernels
    ]
    assert cells == [2 * num * SIZE * 128**2 for num in (2, 3, 4)]


def test_splash_reports_the_needed_flops_of_the_reference():
    forward = jax.make_jaxpr(of_core(SPLASH, 100))(*inputs())
    expected = jax.make_jaxpr(of_core(Reference(), 100))(*inputs())
    assert needed_flops(traced_products(forward)) == needed_flops(traced_products(expected))


# cudnn -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 1, 100])
def test_the_call_for_cudnn_computes_the_reference(window):
    """XLA computes `jax.nn.dot_product_attention` with the arguments that cuDNN gets."""

    def attend(q, k, v, _):
        return cudnn._attend(q, k, v, window, "xla")

    found = jax.jit(with_gradients(attend))(*inputs())
    assert difference(found, reference(window, documents=False)) < ROUNDING
    assert difference(found, reference((window or SEQ) - 20, documents=False)) > 1e-3


@pytest.fixture
def on_h100(monkeypatch):
    """Programs are traced as if for an H100. docs/guides/long-context.md has what was measured on one."""
    monkeypatch.setattr(shared, "platform", lambda: "gpu")
    for module in (cudnn, shared):
        monkeypatch.setattr(module, "of_mesh", lambda ctx: {"capability": (9, 0)})
        monkeypatch.setattr(module, "current", lambda: OnH100)
    monkeypatch.setattr(cudnn, "is_compile_only", lambda mesh: True)


class OnH100:
    mesh = None

    @staticmethod
    def shards(dim):
        return 1


@pytest.mark.parametrize("window", [None, 100])
def test_the_calls_of_cudnn_have_our_arguments(on_h100, window):
    q, k, v, _ = (x.astype("bfloat16") for x in inputs())
    program = jax.make_jaxpr(with_gradients(of_core(Cudnn(), window)))(q, k, v, None)
    forward, backward = (visit for visit in walk(program) if visit.primitive.startswith("dot_product_attention"))
    for call in (forward.equation, backward.equation):
        assert [x.aval.shape for x in call.invars[:3]] == [q.shape, k.shape, v.shape]
        assert (call.params["mask_type"].name, call.params["layout"]) == ("CAUSAL", 0)
        assert call.params["scale"] == pytest.approx(SIZE**-0.5)
        assert call.params["sliding_window_length"] == window
    width = window or SEQ
    needed = 2 * BATCH * HEADS * SIZE * (SEQ * width - width**2 // 2)
    counted = {p.kind: p.total for p in traced_products(program)}
    assert counted["dot_product_attention_fwd_wrapper"] == 2 * needed
    assert counted["dot_product_attention_bwd_wrapper"] == 5 * needed


@pytest.mark.parametrize("core", [Cudnn(), SPLASH])
def test_the_backward_runs_the_forward_again_unless_both_of_its_results_are_saved(request, core):
    if core != SPLASH:
        request.getfixturevalue("on_h100")
    arrays = [x.astype("bfloat16") for x in inputs()[:3]]

    def computed(attend):
        return sum(flops(traced_products(jax.make_jaxpr(with_gradients(attend))(*arrays, None))).values())

    def saving(*names):
        return computed(jax.checkpoint(of_core(core), policy=Remat(save=names).checkpoint_policy()))

    assert saving("attn", "log_mass") == computed(of_core(core))
    assert saving("attn") == saving("log_mass") == saving() > saving("attn", "log_mass")


def test_documents_are_described_as_cudnn_expects():
    segments = jnp.asarray([[1, 1, 1, 2, 2, 0], [4, 4, 4, 4, 4, 4], [1, 2, 3, 0, 0, 0]])
    sizes, offsets = cudnn._documents(cudnn._opens(segments), 4)
    np.testing.assert_array_equal(sizes, [[3, 2, 1, -1], [6, -1, -1, -1], [1, 1, 1, 3]])
    np.testing.assert_array_equal(offsets, [[0, 3, 5, -1, -1], [0, -1, -1, -1, -1], [0, 1, 2, 3, -1]])


@pytest.mark.parametrize("window", [None, 100])
def test_rows_of_several_documents_are_packed(on_h100, window):
    """Each call has the documents; the operations are those of the visible scores, as in one document."""
    q, k, v, segments = inputs()
    program = jax.make_jaxpr(with_gradients(of_core(Cudnn(most_documents=5), window)))(
        *(x.astype("bfloat16") for x in (q, k, v)), segments
    )
    calls = [visit.equation for visit in walk(program) if visit.primitive.startswith("dot_product_attention")]
    for call in calls:
        assert [x.aval.shape for x in call.invars[:3]] == [q.shape] * 3
        assert [x.aval.shape for x in call.invars[4:8]] == [(BATCH, 5)] * 2 + [(BATCH, 6)] * 2
        assert (call.params["mask_type"].name, call.params["sliding_window_length"]) == ("CAUSAL", window)
    joined = jax.make_jaxpr(with_gradients(of_core(Cudnn(), window)))(*(x.astype("bfloat16") for x in (q, k, v)), None)
    assert len(calls) == 2
    assert needed_flops(traced_products(program)) == needed_flops(traced_products(joined))


def test_rows_are_packed_some_at_a_time(on_h100, monkeypatch):
    """Of six rows, a call that may take four takes three: the most that divide them."""
    q, k, v, segments = (jnp.concatenate([x] * 6) for x in inputs())
    monkeypatch.setattr(cudnn, "MOST_BYTES", 4 * 4 * Cudnn().most_documents * q[0].size)
    arrays = [x.astype("bfloat16") for x in (q, k, v)]
    program = jax.make_jaxpr(with_gradients(of_core(Cudnn())))(*arrays, segments)
    calls = [visit for visit in walk(program) if visit.primitive.startswith("dot_product_attention")]
    assert [(visit.equation.invars[0].aval.shape[0], visit.times) for visit in calls] == [(3, 2)] * 2
    row_sum = lambda q, k, v, sizes, offsets, window: q + offsets[:, 1, None, None, None].astype(q.dtype)
    monkeypatch.setattr(cudnn, "_packed", row_sum)
    rows = jnp.arange(6)[:, None] * jnp.ones((6, 17), jnp.int32)
    out = cudnn._by_rows(q, k, v, rows[:, 1:], rows, None)
    np.testing.assert_array_equal(out, q + np.arange(6, dtype="float32")[:, None, None, None])


@pytest.mark.parametrize(("documents", "packed"), [([1, 1, 2, 0], True), ([1, 2, 3, 0], False), ([1, 2, 2, 1], False)])
def test_blocks_compute_rows_that_cudnn_cannot(on_h100, monkeypatch, documents, packed):
    """More documents than `most_documents`, or a document in two pieces."""
    monkeypatch.setattr(cudnn, "_packed", lambda q, *_: jnp.zeros_like(q))
    q, k, v, _ = (x.astype("bfloat16") for x in inputs())
    segments = jnp.repeat(jnp.asarray([documents], jnp.int32), SEQ // 4, axis=1)
    out = jax.jit(of_core(Cudnn(most_documents=3)))(q, k, v, segments)
    expected = jax.jit(of_core(Blocks(block_size=512)))(q, k, v, segments)
    np.testing.assert_array_equal(out, jnp.zeros_like(out) if packed else expected)


@pytest.mark.parametrize(("dtype", "calls"), [("bfloat16", 2), ("float32", 0)])
def test_attention_to_all_tokens_is_cudnns_too(on_h100, monkeypatch, dtype, calls):
    """Of a ViT or an encoder-decoder; the keys may be those of another row. Beyond the limits blocks are large."""
    monkeypatch.setattr(functional, "platform", lambda: "gpu")
    q, k, v, _ = inputs(dtype, seq=1024)
    program = jax.make_jaxpr(with_gradients(lambda q, k, v, _: attend(q, k, v, causal=False)))(
        q, k[:, :768], v[:, :768], None
    )
    found = [visit.equation for visit in walk(program) if visit.primitive.startswith("dot_product_attention")]
    assert [call.params["mask_type"].name for call in found] == ["NO_MASK"] * calls
    assert needed_flops(traced_products(program)) == pytest.approx(7 * 2 * BATCH * HEADS * SIZE * 1024 * 768)
    sizes = {visit.equation.outvars[0].aval.shape[-1] for visit in walk(program) if visit.primitive == "exp"}
    assert not sizes if calls else sizes >= {512, 384}


def test_heads_of_256_are_traced_for_a_gpu_that_has_them(on_h100):
    wide = [jax.ShapeDtypeStruct((1, 128, 2, 256), "bfloat16")] * 3
    assert jax.eval_shape(with_gradients(of_core(Cudnn())), *wide, None)[1].shape == (1, 128, 2, 256)


# Limits ----------------------------------------------------------------------------------------------------------

BF16 = np.dtype("bfloat16")
GPU = Setting(seq_len=1024, head_dim=128, dtype=BF16, has_documents=False, platform="gpu", capability=(9, 0))
TPU = Setting(seq_len=1024, head_dim=128, dtype=BF16, platform="tpu")
ONE_WINDOW = "computes one window in all layers, and the layers of this model have different ones"
SEVERAL = "a row may contain several documents (data.documents_in_row=separate)"
LIMITS = [
    (Cudnn(), GPU, {}, []),
    (Cudnn(), GPU, {"platform": None, "capability": None}, []),
    (Cudnn(), GPU, {"platform": "cpu"}, ["needs an NVIDIA GPU, and this program is for a CPU"]),
    (
        Cudnn(),
        GPU,
        {"capability": (7, 5)},
        ["needs compute capability 8.0 or higher, and this GPU has 7.5"],
    ),
    (
        Cudnn(),
        GPU,
        {"dtype": np.dtype("float32")},
        ["computes bfloat16 and float16, and this model computes float32"],
    ),
    (Cudnn(), GPU, {"head_dim": 256}, []),
    (
        Cudnn(),
        GPU,
        {"head_dim": 256, "capability": (8, 0)},
        ["needs heads of at most 128 elements, a multiple of 8, and these have 256"],
    ),
    (Cudnn(), GPU, {"head_dim": 12}, ["needs heads of at most 256 elements, a multiple of 8, and these have 12"]),
    (
        Cudnn(),
        GPU,
        {"has_documents": True, "window_varies": True, "capability": (8, 6), "is_local": False},
        [
            f"separates documents since compute capability 9.0, and {SEVERAL}",
            f"separates documents with lowering=manual alone, and {SEVERAL}",
            ONE_WINDOW,
        ],
    ),
    (Cudnn(), GPU, {"has_documents": True, "window": 5}, []),
    (Splash(), TPU, {}, []),
    (Splash(), TPU, {"window": 5, "dtype": np.dtype("float32"), "head_dim": 40}, []),
    (Splash(), TPU, {"platform": "cpu"}, ["needs a TPU, and this program is for a CPU"]),
    (SPLASH, TPU, {"platform": "cpu"}, []),
    (
        Splash(),
        TPU,
        {"is_local": False},
        ["is a Pallas kernel, which XLA does not partition: it needs lowering=manual"],
    ),
    (
        Splash(),
        TPU,
        {"dtype": np.dtype("float64"), "seq_len": 1000, "window_varies": True},
        [
            "computes bfloat16 and float32, and this model computes float64",
            "needs rows of a multiple of 128 tokens, and these have 1000",
            ONE_WINDOW,
        ],
    ),
]


@pytest.mark.parametrize(("core", "of", "changes", "expected"), LIMITS)
def test_each_limit_is_named(core, of, changes, expected):
    assert core.limits(replace(of, **changes)) == expected


def test_a_core_that_is_called_beyond_its_limits_raises():
    with pytest.raises(ConfigError, match=r"needs a TPU, and this program is for a CPU\n +model.attention=blocks"):
        of_core(Splash())(*inputs())


def run_with(attention, **settings):
    return Run(
        model=Llama(num_layers=1, hidden_size=16, num_heads=2, intermediate_size=32, attention=attention),
        data=Synthetic(batch_size=2, seq_len=128, documents_in_row="joined"),
        optim=AdamW(lr=1e-3),
        precision=Precision(compute="bfloat16"),
        mesh=MeshLayout(data=2),
        num_steps=1,
        run_dir="unused",
        **settings,
    )


def test_a_run_on_devices_of_another_kind_is_refused_before_anything_is_compiled():
    devices = jax.devices()[:2]
    for core, device in ((Cudnn(), "an NVIDIA GPU"), (Splash(), "a TPU")):
        run = run_with(core)
        with pytest.raises(ConfigError, match=f"needs {device}, and this program is for a CPU"):
            prepare(run, run.mesh.build(devices))
        assert core.kind in prepare(run, run.mesh.abstract()).selected["model.attention"]
    run = run_with(Splash(), lowering="auto")
    with pytest.raises(ConfigError, match="XLA does not partition: it needs lowering=manual"):
        prepare(run, run.mesh.abstract())


def test_joined_rows_have_no_segments_in_the_step():
    run = run_with(Auto())
    prepared = prepare(run, run.mesh.build(jax.devices()[:2]))
    assert {*prepared.batch} == {"tokens", "targets", "positions"}
    assert prepared.model_flops == prepare(run, run.mesh.abstract()).model_flops > 0


def test_a_step_with_splash_needs_the_flops_of_one_with_blocks():
    def prepared(core):
        run = run_with(core)
        return prepare(run, run.mesh.build(jax.devices()[:2]))

    run = prepared(Splash(interpret=True))
    assert run.model_flops == prepared(Blocks()).model_flops
    # One layer, one row on each device, one pair of blocks: forward 2 products, backward 3 and 4.
    assert (run.traced_flops or {})["pallas_call"] == (2 + 3 + 4) * 2 * HEADS * SIZE * 128**2


def test_prompts_beyond_the_limits_of_a_kernel_are_computed_in_blocks():
    q = inputs()[0]
    assert for_prompts(Cudnn(), q, None) == for_prompts(Splash(), q, None) == Blocks()
    assert for_prompts(SPLASH, q, None) == SPLASH and for_prompts(Reference(), q, None) == Reference()


def test_auto_selects_the_kernel_of_a_platform_within_its_limits():
    select = Auto().select
    assert select(GPU) == (Cudnn(), "the kernel for a GPU, whose limits hold")
    assert select(TPU) == (Splash(), "the kernel for a TPU, whose limits hold")
    assert select(replace(GPU, has_documents=True))[0] == Cudnn()
    core, why = select(replace(GPU, has_documents=True, capability=(8, 0)))
    assert core == Blocks(block_size=512) and why.startswith("cudnn separates documents since compute capability 9.0")
    assert select(replace(TPU, is_local=False))[0] == select(replace(TPU, seq_len=1000))[0] == Blocks()
    assert select(replace(TPU, platform="cpu"))[0] == select(replace(TPU, platform=None))[0] == Blocks()
    assert select(replace(GPU, seq_len=128))[0] == select(replace(TPU, seq_len=128))[0] == Reference()


def test_what_auto_would_select_elsewhere_is_explained_without_devices():
    blocks = "blocks: 36 of 64 pairs of blocks of 128 tokens; CPUs have no kernel"
    on_tpu = "on a TPU splash: 3 of 4 pairs of blocks of 512 tokens"
    assert Auto().describe(replace(TPU, platform=None, has_documents=False)) == (
        f"{blocks}; on a GPU cudnn: the visible scores, in tiles of cuDNN's choice; {on_tpu}"
    )
    assert Auto().describe(replace(TPU, platform=None)) == (
        f"{blocks}; on a GPU cudnn: the visible scores, in tiles of cuDNN's choice "
        f"(blocks if a row has more than 16 documents); {on_tpu}"
    )


def test_a_small_run_for_verify_computes_what_the_kernels_do_in_blocks():
    assert Cudnn().reference(4096, 16) == Splash().reference(4096, 16) == Blocks(block_size=2)


@pytest.mark.parametrize("core", [Reference(), Blocks(block_size=64)])
def test_a_row_without_segments_is_one_document(core):
    q, k, v, _ = inputs()
    one_document = jnp.ones((BATCH, SEQ), jnp.int32)
    assert difference([of_core(core)(q, k, v, None)], [of_core(core)(q, k, v, one_document)]) == 0
