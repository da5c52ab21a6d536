"""A mixture of experts on one device: its router, its two dispatches, and the settings that it refuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from meshpar.cost.flops import flops, needed_flops, traced_products
from meshpar.errors import ConfigError, MeshparError
from meshpar.experiment.config import Run
from meshpar.experiment.prepare import prepare
from meshpar.mesh.layout import MeshLayout
from meshpar.models import Llama
from meshpar.nn.describe import functional, nested
from meshpar.nn.experts import Balance, Experts, mixture, mlp, tiles
from meshpar.nn.experts.balance import RouterState, summary
from meshpar.nn.experts.capacity import by_capacity
from meshpar.nn.experts.layer import DROPPED, MixtureOfExperts
from meshpar.nn.experts.mlp import ExpertWeights, Matrices
from meshpar.nn.experts.routing import LOAD
from meshpar.nn.experts.sorting import Order
from meshpar.nn.experts.tiles import SMALLEST, Tile, Tiles, of_choices
from meshpar.nn.lora import LoRA
from meshpar.tree import flatten_with_paths

ROWS, SEQ, WIDTH, HIDDEN = 3, 16, 8, 12
BASE = Experts(num=8, per_token=3, intermediate_size=HIDDEN)
ROUTERS = {
    "mixtral": BASE,
    "olmoe": BASE.model_copy(update={"normalize": False}),
    "deepseek": Experts(
        num=8, per_token=3, intermediate_size=HIDDEN, shared=2, router="sigmoid", scale=2.5, groups=4,
        groups_per_token=2, balance=Balance(kind="bias"),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _float64(float64):
    """Every test here."""


def layer(experts, key=0):
    """A layer with a bias that changes the selection, if it has one."""
    built = MixtureOfExperts(WIDTH, experts, out_std=0.3, rngs=nnx.Rngs(key))
    if built.router.bias is not None:
        built.router.bias[...] = jnp.linspace(0.3, -0.3, experts.num, dtype=jnp.float32)
    return built


def tokens():
    return jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, SEQ, WIDTH)))


def silu(x):
    return x / (1 + np.exp(-x))


def selected(experts, score, bias):
    """The experts of one token, best first, from DeepSeek-V3's definition."""
    score = score + bias
    groups = score.reshape(experts.groups, -1)
    best = np.argsort(-np.sort(groups, axis=1)[:, -2:].sum(1), kind="stable")[: experts.groups_per_token]
    allowed = np.isin(np.arange(experts.num) // groups.shape[1], best) | (experts.groups == 1)
    return np.argsort(-np.where(allowed, score, -np.inf), kind="stable")[: experts.per_token]


def by_loop(built, x):
    """The layer as a loop over tokens and their experts, in NumPy."""
    experts = built.config
    router = np.asarray(built.router.weight[...])
    bias = 0 if built.router.bias is None else np.asarray(built.router.bias[...])
    gate, up, down = (np.asarray(getattr(built.experts, name).kernel[...]) for name in ("gate", "up", "down"))
    y = np.zeros(x.shape)
    for place in np.ndindex(*x.shape[:2]):
        token = np.asarray(x[place])
        logits = token @ router
        odds = np.exp(logits - logits.max())
        score = odds / odds.sum() if experts.router == "softmax" else 1 / (1 + np.exp(-logits))
        ids = selected(experts, score, bias)
        divisor = score[ids].sum() if experts.normalize else 1
        for i in ids:
            y[place] += experts.scale * score[i] / divisor * ((silu(token @ gate[i]) * (token @ up[i])) @ down[i])
        if built.shared is not None:
            a, b, c = (np.asarray(one.kernel[...]) for one in (built.shared.gate, built.shared.up, built.shared.down))
            y[place] += (silu(token @ a) * (token @ b)) @ c
    return y


@pytest.mark.parametrize("dispatch", ["dropless", "capacity"])
@pytest.mark.parametrize("router", ROUTERS)
def test_the_layer_is_a_loop_over_the_experts_of_each_token(router, dispatch):
    built = layer(ROUTERS[router].model_copy(update={"dispatch": dispatch, "capacity_factor": 8.0}))
    y, auxiliary = built(tokens())
    assert np.abs(y - by_loop(built, tokens())).max() < 1e-12
    assert auxiliary.metrics.get(DROPPED, 0) == 0


def test_the_loop_is_another_one_if_weights_are_not_normalized():
    built = layer(ROUTERS["mixtral"])
    other = layer(ROUTERS["olmoe"])
    assert np.abs(built(tokens())[0] - by_loop(other, tokens())).max() > 1e-3


def test_ties_go_to_the_expert_with_the_lower_number():
    built = layer(BASE)
    built.router.weight[...] = jnp.zeros((WIDTH, BASE.num))
    assert (np.asarray(built.router(tokens()).ids) == np.arange(BASE.per_token)).all()


def test_the_router_computes_in_float32():
    graph, state = nnx.split(layer(BASE).router)
    router = nnx.merge(graph, jax.tree.map(lambda x: x.astype(jnp.bfloat16), state))
    assert router(tokens().astype(jnp.bfloat16)).weights.dtype == jnp.float32


@pytest.mark.parametrize("dispatch", ["dropless", "capacity"])
def test_loras_update_of_an_expert_is_added_to_its_matrices(dispatch):
    experts = BASE.model_copy(update={"dispatch": dispatch, "capacity_factor": 8.0})
    lora = LoRA(rank=2, paths=("experts.*",))
    built = layer(experts)
    lora.adapt(built, nnx.Rngs(1))
    for projection in (built.experts.gate, built.experts.up, built.experts.down):
        assert projection.lora.a.shape[0] == projection.lora.b.shape[0] == experts.num
        b = np.random.default_rng(0).normal(size=projection.lora.b.shape)
        projection.lora.b = nnx.Param(jnp.asarray(0.1 * b))
    merged = lora.merged(flatten_with_paths(nnx.to_pure_dict(nnx.state(built, nnx.Param))))
    plain = functional(layer(experts))
    y = built(tokens())[0]
    assert (
        np.abs(y - plain(nested({tuple(path.split(".")): x for path, x in merged.items()}), tokens())[0]).max() < 1e-12
    )
    assert np.abs(y - layer(experts)(tokens())[0]).max() > 1e-3


def test_the_function_for_a_users_model_refuses_what_only_a_step_can_change():
    arrays = [jnp.ones(shape) for shape in ((WIDTH, 8), (8, WIDTH, HIDDEN), (8, WIDTH, HIDDEN), (8, HIDDEN, WIDTH))]
    with pytest.raises(ConfigError, match="supports neither shared experts nor a balance that changes parameters"):
        mixture(tokens(), *arrays, ROUTERS["deepseek"])


# Capacity ------------------------------------------------------------------------------------------------------


def test_first_choices_get_places_before_second_ones_and_early_tokens_before_late_ones():
    ids = jnp.asarray([[[0, 1], [0, 1], [1, 0]]], jnp.int32)
    _, is_kept = by_capacity(jnp.ones((1, 3, 2)), ids, jnp.ones((1, 3, 2)), lambda x: x, num_experts=2, places=2)
    # Expert 0: tokens 0, 1 by their first choice. Expert 1: token 2 by its first, token 0 by its second choice.
    assert is_kept.tolist() == [[[True, True], [True, False], [True, False]]]


def test_dropped_choices_contribute_nothing_and_are_counted():
    experts = BASE.model_copy(update={"dispatch": "capacity", "capacity_factor": 0.5})
    built = layer(experts)
    built.router.weight[...] = jnp.zeros((WIDTH, BASE.num))  # all tokens select experts 0, 1, 2
    y, auxiliary = built(tokens())
    places = experts.capacity(SEQ)
    assert places == 3
    assert auxiliary.metrics[DROPPED] == pytest.approx(1 - places / SEQ)
    assert (y[:, places:] == 0).all()
    assert (y[:, :places] != 0).any(-1).all()


def test_only_tokens_with_a_target_count():
    built = layer(BASE.model_copy(update={"balance": Balance(weight=1.0), "z_loss": 1.0}))
    targets = jnp.where(jnp.arange(SEQ) < 5, 1, -1) * jnp.ones((ROWS, 1), jnp.int32)
    found = built(tokens(), targets.astype(jnp.int32))[1]
    expected = built(tokens()[:, :5])[1]
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


# Balance -------------------------------------------------------------------------------------------------------


def test_the_balance_loss_is_the_products_of_loads_and_mean_scores():
    built = layer(BASE.model_copy(update={"balance": Balance(weight=0.1)}))
    _, auxiliary = built(tokens())
    scores = np.asarray(jax.nn.softmax(tokens() @ built.router.weight[...]).mean((0, 1)))
    counts = np.bincount(np.asarray(built.router(tokens()).ids).reshape(-1), minlength=BASE.num)
    np.testing.assert_allclose(auxiliary.metrics[LOAD], counts / counts.sum())
    assert auxiliary.losses["balance_loss"] == pytest.approx(0.1 * BASE.num * (counts / counts.sum() * scores).sum())


def test_the_balance_loss_of_the_last_steps_load_reads_a_parameter():
    built = layer(BASE.model_copy(update={"balance": Balance(weight=0.1, load="last_step")}))
    load = np.linspace(0, 0.25, BASE.num, dtype=np.float32)
    built.router.load[...] = jnp.asarray(load)
    scores = np.asarray(jax.nn.softmax(tokens() @ built.router.weight[...]).mean((0, 1)))
    assert built(tokens())[1].losses["balance_loss"] == pytest.approx(0.1 * BASE.num * (load * scores).sum())


def test_a_bias_moves_towards_an_even_load_and_stays_where_it_is_even():
    state = RouterState(Experts(num=4, per_token=1, intermediate_size=1, balance=Balance(kind="bias", weight=0.1)))
    params = {"blocks": {"mlp": {"router": {"bias": jnp.zeros((2, 4)), "weight": jnp.ones(3)}}}}
    load = jnp.asarray([[0.5, 0.25, 0.25, 0.0], [0.25] * 4])
    moved, metrics = state.after_step(params, {LOAD: load, "other": jnp.ones(())}, jnp.int32(12))
    assert moved["blocks"]["mlp"]["router"]["bias"].tolist() == [[-0.1, 0, 0, 0.1], [0, 0, 0, 0]]
    assert set(metrics) == {"other", LOAD, "experts_max_load", "experts_entropy"}


def test_a_bias_is_stored_in_float32_because_bfloat16_would_lose_its_changes():
    """Above 0.5 the numbers of bfloat16 have a distance of 1/256."""
    experts = Experts(num=4, per_token=1, intermediate_size=8, balance=Balance(kind="bias", weight=0.001))
    model = Llama(num_layers=2, hidden_size=16, num_heads=4, intermediate_size=32, experts=experts)
    found = prepare(run_of(model=model, precision={"params": "bfloat16"}), MeshLayout().abstract()).specs
    router = found["blocks"]["mlp"]["router"]
    assert (router["bias"].dtype, router["weight"].dtype) == (jnp.float32, jnp.bfloat16)

    def moved(dtype):
        bias = jnp.full((1, 4), 0.6, dtype)
        params = {"blocks": {"mlp": {"router": {"bias": bias}}}}
        after, _ = RouterState(experts).after_step(params, {LOAD: jnp.asarray([[1.0, 0, 0, 0]])}, jnp.int32(8))
        return (after["blocks"]["mlp"]["router"]["bias"] != bias).all()

    assert moved(jnp.float32)
    assert not moved(jnp.bfloat16)


def test_the_summary_is_of_the_layer_with_the_most_uneven_load():
    found = summary(jnp.asarray([[0.25] * 4, [1.0, 0, 0, 0]]))
    assert (found["experts_max_load"], found["experts_entropy"]) == (4, 0)


# Products of sorted rows ----------------------------------------------------------------------------------------


def with_gradients(product, sizes):
    """The result of a product of 170 weighted rows, and the gradients of all operands."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(170, 5)))
    w = jnp.asarray(rng.normal(size=(len(sizes), 5, 6)))
    weights = jnp.asarray(rng.normal(size=170))
    y, pull = jax.vjp(lambda *operands: product(*operands, jnp.asarray(sizes, jnp.int32)), x, w, weights)
    return y, *pull(jnp.cos(y))


def in_tiles(x, w, weights, sizes):
    """The product as the last one of experts whose hidden layer is x: silu of 64 is 64, and up is x / 64."""
    num_groups, width, outputs = w.shape
    gate = jnp.zeros((num_groups, outputs, width), x.dtype).at[:, -1].set(64)
    up = jnp.broadcast_to(jnp.eye(outputs, width, dtype=x.dtype) / 64, gate.shape)
    x = jnp.concatenate([x, jnp.ones((len(x), 1), x.dtype)], 1)
    rows = jnp.arange(len(x), dtype=jnp.int32)
    experts = ExpertWeights(Matrices(gate), Matrices(up), Matrices(w))
    return of_choices(x, weights[:, None], Order(rows, rows[:, None]), sizes, experts, expected=len(x))


def by_xla(x, w, weights, sizes):
    return lax.ragged_dot(x, w, sizes) * weights[:, None]


# The last tile of an expert ends beyond the rows, experts have none, rows belong to no expert.
@pytest.mark.parametrize("sizes", [(5, 0, 146, 19), (170, 0, 0, 0), (3, 65, 64, 1), (0, 0, 0, 0)])
def test_products_in_tiles_are_the_ragged_ones(sizes):
    for one, other in zip(with_gradients(in_tiles, sizes), with_gradients(by_xla, sizes), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


def test_a_tile_that_counts_rows_of_another_expert_is_seen(monkeypatch):
    monkeypatch.setattr(Tile, "weights", lambda tile, rows: tile.cut(rows.weights)[:, None])
    found, expected = (with_gradients(product, (5, 0, 146, 18))[:3] for product in (in_tiles, by_xla))
    assert all(np.abs(a - b).max() > 1e-3 for a, b in zip(found, expected, strict=True))


def errors_in_bfloat16():
    """The errors of a product of bfloat16 and of both gradients, over the bounds of a sum in float32, rounded once."""
    rng = np.random.default_rng(0)
    sizes = np.asarray([5, 0, 400, 107], np.int32)
    shapes = {"x": (sizes.sum(), 32), "w": (len(sizes), 32, 33), "dy": (sizes.sum(), 33)}
    arrays = {name: jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for name, shape in shapes.items()}
    ones = jnp.ones(sizes.sum(), jnp.bfloat16)
    y, pull = jax.vjp(lambda x, w: in_tiles(x, w, ones, jnp.asarray(sizes)), arrays["x"], arrays["w"])
    found = y, *pull(arrays["dy"])
    x, w, dy = (np.asarray(array, np.float64) for array in arrays.values())
    of_group = np.eye(len(sizes))[np.repeat(np.arange(len(sizes)), sizes)]

    def products(x, w, dy):
        of_row = w[np.repeat(np.arange(len(sizes)), sizes)]
        dx = np.einsum("nm,nkm->nk", dy, of_row)
        return np.einsum("nk,nkm->nm", x, of_row), dx, np.einsum("ng,nk,nm->gkm", of_group, x, dy)

    longest = (x.shape[1], dy.shape[1], sizes.max())
    exact = products(x, w, dy)
    absolute = products(*map(np.abs, (x, w, dy)))
    bounds = [2.0**-8 * np.abs(a) + n * 2.0**-24 * b for a, b, n in zip(exact, absolute, longest, strict=True)]
    errors = [np.abs(np.asarray(a, np.float64) - b) for a, b in zip(found, exact, strict=True)]
    return [float((error / (bound + (bound == 0))).max()) for error, bound in zip(errors, bounds, strict=True)]


def test_products_of_bfloat16_are_rounded_once(monkeypatch):
    """Control: with a gradient that is summed over tiles in bfloat16."""
    assert all(0.5 < one <= 1 for one in errors_in_bfloat16())
    for module in (mlp, tiles):
        monkeypatch.setattr(module, "wide_dtype", lambda dtype: dtype)
    assert errors_in_bfloat16()[2] > 4


def multiplied(rows, groups, per_tile):
    """Rows of all tiles over those that a random router sends to the groups."""
    sizes = np.random.default_rng(0).multinomial(rows, [1 / groups] * groups)
    return (-(-sizes // per_tile) * per_tile).sum() / rows


@pytest.mark.parametrize(("rows", "groups"), [(24576, 8), (8192, 1), (65536, 64), (5120, 8)])
def test_tiles_multiply_at_most_a_tenth_more_rows_than_arrive(rows, groups):
    per_tile = Tiles.of(8 * rows, groups, rows).rows
    assert multiplied(rows, groups, per_tile) <= 1.10 < multiplied(rows, groups, 64 * per_tile)


def test_the_products_are_those_of_the_experts_of_each_token():
    graph, state = nnx.split(layer(BASE))
    traced = jax.make_jaxpr(lambda state, x: nnx.merge(graph, state)(x)[0])(state, tokens())
    found = [one for one in traced_products(traced) if one.needed != 1]
    rows = ROWS * SEQ * BASE.per_token
    assert needed_flops(found) == 6 * rows * WIDTH * HIDDEN
    # 18 rows of each of 8 experts need a tile.
    assert flops(found) == {"dot_general": 6 * 8 * SMALLEST * WIDTH * HIDDEN}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"per_token": 9}, "per_token = 9 is more than num = 8, the number of experts"),
        ({"groups": 3}, "num = 8 experts cannot be divided into groups = 3"),
        ({"groups": 2, "groups_per_token": 3}, "groups_per_token = 3 is more than groups = 2"),
        ({"groups": 4, "per_token": 3}, "per_token = 3, but groups_per_token = 1 groups have 2 experts"),
    ],
)
def test_experts_that_cannot_be_selected_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Experts(**{"num": 8, "per_token": 2, "intermediate_size": 4} | settings)


@pytest.mark.parametrize(
    ("experts", "fields", "message"),
    [
        ({"first_dense": 3}, {}, "experts: first_dense and every leave none of 3 layers with experts"),
        ({"every": 4}, {}, "experts: first_dense and every leave none of 3 layers with experts"),
    ],
)
def test_layers_without_experts_that_do_not_fit_the_model_are_refused(experts, fields, message):
    experts = Experts(num=8, per_token=2, intermediate_size=4, **experts)
    with pytest.raises(ConfigError, match=message):
        Llama(num_layers=3, hidden_size=16, num_heads=4, intermediate_size=32, experts=experts, **fields)


def run_of(**changes):
    return Run.model_validate({
        "data": {"kind": "synthetic", "batch_size": 8, "seq_len": 16},
        "optim": {"kind": "adamw", "lr": 1e-3},
        "num_steps": 2,
        "run_dir": "unused",
    } | changes)  # fmt: skip


def refusal(**changes):
    """The error of a run that is prepared without devices."""
    model = {"kind": "llama", "num_layers": 2, "hidden_size": 16, "num_heads": 4, "intermediate_size": 32}
    experts = {"num": 6, "per_token": 2, "intermediate_size": 8} | changes.pop("experts", {})
    run = run_of(**{"model": model | {"experts": experts}, "mesh": {"expert": 2}, "rules": ["experts"]} | changes)
    with pytest.raises(MeshparError) as error:
        prepare(run, run.mesh.abstract())
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mesh": {"expert": 4}},
            "blocks.mlp.experts.down.kernel  float32[2, 6, 8, 16]  (layers, experts, mlp, embed)\n"
            "    experts = 6 is not divisible by expert = 4    rule experts -> expert   (preset experts, dispatch)\n"
            "    either mesh.expert=2 or mesh.expert=3 or mesh.expert=6, or rules.experts=[] to replicate it",
        ),
        (
            {"experts": {"dispatch": "capacity", "capacity_factor": 0.1}},
            "0.1 gives an expert no place for a row of 16 tokens: all would be dropped\n"
            "    model.experts.capacity_factor=1.25",
        ),
        (
            {"experts": {"dispatch": "capacity"}, "mesh": {"context": 2}, "rules": ["context"]},
            "its places are for the tokens of a whole row, which context shards\n    model.experts.dispatch=dropless",
        ),
        (
            {"parallel": {"expert": {"kind": "hierarchical", "group": 4}}},
            "2 devices hold the experts, which cannot be divided into groups of 4\n    group=2",
        ),
        (
            {"parallel": {"expert": "gather"}, "experts": {"dispatch": "capacity"}},
            "gather is for dispatch=dropless: dispatch=capacity uses a dense all-to-all",
        ),
        (
            {"parallel": {"expert": "gather"}, "rules": ["replicated"], "mesh": {}},
            "no tokens travel: the rules do not shard experts over an axis of the batch\n"
            "    the preset experts, or no parallel.expert",
        ),
        (
            {
                "parallel": {"expert": "gather"},
                "rules": {"preset": "replicated", "experts": ["tensor"]},
                "mesh": {"tensor": 2},
            },
            "no tokens travel: the rules do not shard experts over an axis of the batch",
        ),
        (
            {"parallel": {"expert": "gather"}, "lowering": "auto"},
            "GSPMD chooses how tokens reach their experts\n    lowering=manual, or no parallel.expert",
        ),
        (
            {"experts": {"balance": "loss"}, "num_microbatches": 2},
            "step: the first of 2 microbatches ends before the load of all is known\n"
            "    model.experts.balance.load=last_step",
        ),
    ],
)
def test_experts_that_the_mesh_does_not_fit_are_refused(changes, message):
    assert message in refusal(**changes)
