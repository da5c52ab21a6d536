"""FLOPs of a traced program: products by hand, loops, branches, shards; and what a model needs."""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from meshpar import GPT, AdamW, AxisRules, Llama, LoRA, MeshLayout, Run, Synthetic, cross_entropy, prepare
from meshpar.cost import walk
from meshpar.cost.flops import flops, needed_flops, traced_products
from meshpar.errors import ProgramError
from meshpar.experiment import mfu
from meshpar.inspection.inspect import inspect
from meshpar.mesh import hardware
from meshpar.parallel.scopes import needed
from meshpar.tree import flatten_with_paths
from tests import pipelines
from tests.program.oracle import flops_per_token

X = jnp.ones((16, 16))
ONE = 2 * 16**3


def traced(function, *arguments) -> int | Fraction:
    return sum(flops(traced_products(jax.make_jaxpr(function)(*arguments))).values())


def compiled(function, *arguments) -> int:
    return inspect(jax.jit(function).lower(*arguments).compile()).flops


def convolved(image, kernel, **options):
    options = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")} | options
    return lax.conv_general_dilated(image, kernel, **options)


IMAGE = jnp.ones((2, 8, 8, 2))
KERNEL = jnp.ones((3, 3, 2, 4))
CONVOLUTIONS = {
    "plain": {},
    "strided": {"window_strides": (2, 1), "padding": ((1, 0), (0, 2))},
    "dilated": {"lhs_dilation": (2, 1), "rhs_dilation": (1, 2), "padding": ((3, -1), (0, 0))},
    "grouped": {"feature_group_count": 2},
}


def test_an_operation_of_the_partitioner_counts_as_what_it_computes():
    def loss(hidden, head):
        return cross_entropy(hidden, head, jnp.zeros((4, 8), jnp.int32)).loss

    assert traced(loss, jnp.ones((4, 8, 16)), jnp.ones((16, 32))) == 2 * 4 * 8 * 16 * 32


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_and_its_gradients_count_as_their_compiled_program(name):
    options = CONVOLUTIONS[name]
    kernel = KERNEL[:, :, : 2 // options.get("feature_group_count", 1)]

    def forward(image, kernel):
        return convolved(image, kernel, **options)

    gradients = jax.grad(lambda image, kernel: jnp.square(forward(image, kernel)).sum(), (0, 1))
    for function in (forward, gradients):
        assert traced(function, IMAGE, kernel) == compiled(function, IMAGE, kernel) > 0


def test_an_edge_of_an_image_meets_two_of_three_rows():
    image = X.reshape(1, 16, 16, 1)
    kernel = jnp.ones((3, 3, 1, 4))
    assert traced(convolved, image, kernel) == 2 * 4 * (14 * 3 + 2 * 2) ** 2


def test_loops_multiply_and_unused_products_do_not_count():
    def nested(x):
        return lax.fori_loop(0, 3, lambda _, x: lax.fori_loop(0, 5, lambda _, x: x @ x, x), x)

    assert traced(nested, X) == 15 * ONE
    assert traced(lambda x: (x @ x, x + 1)[1], X) == 0

    def batched(x):
        return jnp.einsum("bij,bjk->bik", x.reshape(4, 8, 8), x.reshape(4, 8, 8))

    assert traced(batched, X) == 4 * 2 * 8**3


def test_a_branch_counts_by_the_share_of_turns_that_its_scope_names():
    def turn(x, i):
        with jax.named_scope("taken_2_of_8"):
            return lax.cond(i < 2, lambda x: x @ x, lambda x: x, x), None

    def unnamed(x, i):
        return lax.cond(i < 2, lambda x: x @ x, lambda x: x, x), None

    def counted_in_a_loop(turn):
        return traced(lambda x: lax.scan(turn, x, jnp.arange(8))[0], X)

    assert (counted_in_a_loop(turn), counted_in_a_loop(unnamed)) == (2 * ONE, 8 * ONE)


def test_each_branch_of_a_switch_counts_by_its_own_share():
    def turn(x, branch):
        with jax.named_scope("taken_5_2_1_of_8"):
            return lax.switch(branch, [jnp.sin, lambda x: x @ x, lambda x: x @ x @ x], x), None

    def loop(x):
        return lax.scan(turn, x, jnp.array([0] * 5 + [1] * 2 + [2]))[0]

    assert traced(loop, X) == compiled(loop, X) == (2 * 1 + 1 * 2) * ONE


@pytest.mark.parametrize(("turns", "taken", "of"), [(3, 1, 2), (5, 2, 3), (7, 1, 8)])
def test_branches_count_exactly_where_their_share_of_the_turns_is_no_whole_number(turns, taken, of):
    """Of several devices, some take the branch in one turn more; within a loop too."""

    def turn(x, i):
        with jax.named_scope(f"taken_{taken}_of_{of}"):
            return lax.cond(i < taken, lambda x: x @ x, lambda x: x, x), None

    loop = lambda x: lax.scan(turn, x, jnp.arange(turns))[0]
    twice = lambda x: lax.fori_loop(0, of, lambda _, x: loop(x), x)
    assert traced(loop, X) == Fraction(turns * taken, of) * ONE
    assert compiled(loop, X) == round(Fraction(turns * taken, of) * ONE) != turns * taken // of * ONE
    assert traced(twice, X) == compiled(twice, X) == turns * taken * ONE


def test_products_that_remat_repeats_count_twice():
    def loss(x):
        return jnp.tanh(jnp.tanh(x @ x) @ x).sum()

    assert traced(jax.value_and_grad(loss), X) == 6 * ONE
    assert traced(jax.value_and_grad(jax.checkpoint(loss)), X) == 8 * ONE


def test_rows_of_a_ragged_product_meet_one_group_each():
    rows = jnp.ones((8, 4))
    groups = jnp.ones((2, 4, 3))
    sizes = jnp.array([3, 5])

    def product(rows, groups):
        return lax.ragged_dot(rows, groups, sizes)

    gradients = jax.grad(lambda rows, groups: product(rows, groups).sum(), (0, 1))
    assert traced(product, rows, groups) == 2 * 8 * 4 * 3
    assert traced(gradients, rows, groups) == 2 * 2 * 8 * 4 * 3
    assert {found.kind for found in traced_products(jax.make_jaxpr(product)(rows, groups))} == {"ragged_dot_general"}
    assert compiled(product, rows, groups) == 2 * traced(product, rows, groups)  # XLA:CPU: each row, and each group


def test_a_kernel_runs_for_each_place_of_its_grid():
    def kernel(x, y, out):
        out[...] = x[...] @ y[...]

    block = pl.BlockSpec((4, 16), lambda i: (i, 0))
    whole = pl.BlockSpec((16, 16), lambda i: (0, 0))
    shape = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    product = pl.pallas_call(kernel, shape, grid=(4,), in_specs=[block, whole], out_specs=block)
    assert traced(product, X, X) == ONE


def test_shards_count_on_each_device_and_whole_arrays_once():
    mesh = MeshLayout(data=4, tensor=2).abstract()
    local = jax.shard_map(lambda x: x @ x.T, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    (product,) = traced_products(jax.make_jaxpr(local)(X))
    assert (product.num_flops, product.num_shards) == (2 * 4 * 4 * 16, 8)
    assert flops([product], num_devices=8) == {"dot_general": 2 * 4 * 4 * 16}
    assert [product.num_shards for product in traced_products(jax.make_jaxpr(lambda x: x @ x)(X))] == [1]
    partly = jax.shard_map(lambda x: x @ x.T, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    assert [product.num_shards for product in traced_products(jax.make_jaxpr(partly)(X))] == [4]


def test_a_loop_of_unknown_length_cannot_be_counted():
    def until(x):
        return lax.while_loop(lambda x: x.sum() < 1e3, lambda x: x @ x, x)

    with pytest.raises(ProgramError, match="dot_general: in a while loop"):
        traced(until, X)
    assert traced(lambda x: lax.while_loop(lambda x: x.sum() < 1e3, lambda x: x + x, x), X) == 0


def test_bytes_and_flops_come_from_one_walk(monkeypatch):
    """If the walk ignores the lengths of loops, both counts are too small."""
    right = run_of(MODELS["llama"])
    num_flops = right.traced_flops["dot_general"]
    num_bytes = right.traced_bytes["tensor",]
    monkeypatch.setattr(walk, "repeats", lambda visit, num_inside: [Fraction(1)] * num_inside)
    wrong = run_of(MODELS["llama"])
    assert wrong.traced_flops["dot_general"] < num_flops
    assert wrong.traced_bytes["tensor",] < num_bytes


# What a model needs ----------------------------------------------------------------------------------------------

SIZES = {"num_layers": 3, "hidden_size": 16, "num_heads": 4, "intermediate_size": 32, "vocab_size": 32}
MODELS = {
    "llama": Llama(**SIZES),
    "llama_kv": Llama(**SIZES, num_kv_heads=2, head_dim=8, attn_bias="all", remat="full", window=4),
    "llama_padded": Llama(
        **SIZES | {"vocab_size": 29}, pad_vocab_to_multiple=8, pad_layers_to_multiple=2, tie_embeddings=True
    ),
    "gpt": GPT(**SIZES, max_seq_len=8, tie_embeddings=True, dropout=0.1),
    "gpt_untied": GPT(**SIZES, max_seq_len=8),
}
SEQ = 8
ROWS = 4


def run_of(model, **more):
    data = Synthetic(batch_size=ROWS, seq_len=SEQ, vocab_size=29)
    mesh = MeshLayout(fsdp=2, tensor=2)
    rules = AxisRules(preset=("fsdp", "megatron"))
    settings = {"mesh": mesh, "rules": rules, "lowering": "manual", "num_steps": 2, "run_dir": "unused"} | more
    run = Run(model=model, data=data, optim=AdamW(lr=1e-3), **settings)
    return prepare(run, run.mesh.build(jax.devices()[: run.mesh.requested()]))


def by_the_formula(run) -> int:
    """Each kernel multiplies each token, except in layers that are padding."""
    model = run.run.model
    kernels = {path: spec for path, spec in flatten_with_paths(run.specs).items() if path.endswith("kernel")}
    params = sum(spec.size * model.num_layers // model.layer_stack().stacked_layers for spec in kernels.values())
    params += model.padded_vocab * model.hidden_size
    data = run.run.data
    width = model.num_heads * model.head_size
    each = flops_per_token(params, model.num_layers, data.seq_len, width)
    beyond = (data.seq_len - (model.window or data.seq_len)) ** 2 / 2
    unseen = 12 * model.num_layers * width * beyond  # the scores beyond the window, of a row
    return data.batch_size * (data.seq_len * each - unseen)


def test_the_flops_per_token_equal_a_count_by_hand():
    """One layer of width 8, 2 heads of 4, mlp 16 (two matrices), a head of 32 tokens, 10 tokens of context.

    A token's matmuls are 4 x 8 x 8 + 2 x 8 x 16 + 8 x 32 = 768 multiply-adds, 6 operations each; its scores and the
    sum of values by them 2 x 8 multiply-adds for each of 10 tokens, half of them masked.
    """
    assert flops_per_token(768, 1, 10, 8) == 6 * 768 + 6 * (2 * 8 * 10 // 2)


@pytest.mark.parametrize("name", MODELS)
def test_a_decoder_needs_what_the_formula_says(name):
    run = run_of(MODELS[name])
    assert run.model_flops == by_the_formula(run)


@pytest.mark.parametrize("lowering", ["manual", "auto"])
def test_neither_mesh_nor_microbatches_nor_lowering_change_what_a_model_needs(lowering):
    run = run_of(MODELS["llama"], lowering=lowering, num_microbatches=2)
    assert run.model_flops == by_the_formula(run)


def test_the_stages_of_a_pipeline_do_not_change_the_flops_of_a_model():
    schedule = pipelines.scheduled("1f1b", "pipe2", 4)
    run = pipelines.prepared(pipelines.MODELS["tied"](4), "pipe2", schedule, precision="float32")
    assert run.model_flops == by_the_formula(run)


def test_the_flops_of_a_model_include_its_adapter():
    plain, adapted = (run_of(MODELS["llama"], lora=adapt) for adapt in (None, LoRA(rank=2)))
    thin = 2 * 3 * 4 * (16 + 16)  # rank, layers, projections
    assert adapted.model_flops - plain.model_flops == 6 * thin * ROWS * SEQ


def test_products_that_a_model_needs_only_in_part_count_in_part():
    def scores(x):
        with needed(Fraction(1, 2)):
            return jnp.einsum("id,jd->ij", x, x)

    masked, whole = (traced_products(jax.make_jaxpr(f)(X)) for f in (scores, lambda x: jnp.einsum("id,jd->ij", x, x)))
    assert 2 * needed_flops(masked) == needed_flops(whole) == ONE


@pytest.fixture
def chip(monkeypatch):
    """A chip of 1e12 operations a second in place of the CPU."""
    chip = hardware.Chip("test", ("cpu",), 1e12, 1e9, 1e9)
    monkeypatch.setattr(mfu, "chip_of", lambda device: chip)
    return chip


def test_the_utilization_is_what_the_model_needs_over_what_the_chips_can_do(chip):
    run = run_of(MODELS["gpt"])
    assert mfu.mfu_of(run)(1e6) == pytest.approx(1e6 * by_the_formula(run) / (ROWS * SEQ) / (4 * 1e12))


def test_without_a_known_chip_there_is_no_utilization():
    assert mfu.mfu_of(run_of(MODELS["llama"])) is None
