"""Each strategy of a user's model inside of a pipeline's stages: equal to the same without stages, or refused by name.

`test_strategies_of_any_model.py` compares those without stages with plain JAX. A table in the guide "Pipeline your own
model" has these strategies.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar import AxisRules, MeshLayout, Parallel, Reduce, ScheduleFile, Training, checkpoints, training
from meshpar.errors import MeshparError
from meshpar.optim import AdamW
from meshpar.parallel.pipeline.get_schedule import get_schedule
from meshpar.train.error_feedback import REDUCE
from meshpar.train.program import with_rows
from meshpar.verification.trial import QUICK
from tests.equivalence.strategies import difference

ROWS, WIDTH, LAYERS = 16, 8, 4
LAYOUTS: dict[str, tuple[dict[str, int], list[str]]] = {
    "stages": ({"pipe": 2, "fsdp": 2, "tensor": 2}, ["pipeline", "fsdp", "megatron"]),
    "apart": ({"fsdp": 2, "tensor": 2}, ["fsdp", "megatron"]),
    "slices in stages": ({"replica": 2, "pipe": 2, "fsdp": 2}, ["pipeline", "hsdp"]),
    "slices apart": ({"replica": 2, "fsdp": 2}, ["hsdp"]),
    "more stages": ({"pipe": 4, "fsdp": 2}, ["pipeline", "fsdp"]),
}
DIMS = {
    "layers.w": ("layers", "embed", "mlp"),
    "layers.v": ("layers", "mlp", "embed"),
    "layers.scale": ("layers", "embed"),
    "ends": ("features", "embed"),
}


@pytest.fixture(autouse=True)
def _float64(float64):
    with jax.numpy_dtype_promotion("standard"):
        yield


def init(key: jax.Array) -> Any:
    keys = jax.random.split(key, 3)

    def drawn(key, *shape):
        return jax.random.normal(key, shape, jnp.float64) * 0.3

    w, v = drawn(keys[0], LAYERS, WIDTH, 16), drawn(keys[1], LAYERS, 16, WIDTH)
    layers = {"w": w, "v": v, "scale": jnp.ones((LAYERS, WIDTH), jnp.float64)}
    return {"layers": layers, "ends": drawn(keys[2], WIDTH, WIDTH)}


def loss(params: Any, batch: Any, key: Any) -> Any:
    def layer(x, layer):
        return x + jnp.tanh(x * layer["scale"] @ layer["w"]) @ layer["v"], None

    x = jax.lax.scan(jax.checkpoint(layer), batch["x"] @ params["ends"], params["layers"])[0]
    return jnp.square(x @ params["ends"].T - batch["y"]).mean(), {"size": jnp.abs(x).mean()}


@lru_cache
def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{name: rng.normal(size=(ROWS, WIDTH)) for name in ("x", "y")} for _ in range(3)]


def made(
    layout: str, kind: str | None = None, tx: Any = None, parallel: Any = None, cut: Any = None, **options: Any
) -> Training:
    sizes, presets = LAYOUTS[layout]
    mesh = MeshLayout(**sizes)
    schedule = get_schedule(kind, sizes["pipe"], 4).model_copy(update={"cut": cut}) if kind else None
    return training(
        init, loss, tx or optax.sgd(0.1, momentum=0.9), batches()[0],
        mesh=mesh.build(jax.devices()[: mesh.requested()]), rules=AxisRules(preset=presets, features=()), dims=DIMS,
        parallel=Parallel(**{"pipeline": schedule} | (parallel or {})), **{"compute_dtype": np.float64} | options,
    )  # fmt: skip


def steps(made: Training, state: Any = None, start: int = 0, num: int = 2) -> tuple[list[float], Any]:
    step = made.compile_step(QUICK)
    state = state or made.compile_init(QUICK)()
    losses = []
    for batch in batches()[start : start + num]:
        state, metrics = step(state, made.put(batch))
        losses.append(float(np.mean(step.read(metrics)["loss"])))
    return losses, state


KERNELS = ["layers.w", "layers.v"]
PRUNED = {"kind": "magnitude", "sparsity": 0.5, "every": 1, "times": 1, "paths": KERNELS}
STRATEGIES: dict[str, dict[str, Any]] = {
    "accumulation around the pipeline": {"num_microbatches": 2},
    "LoRA": {"lora": {"rank": 2, "alpha": 4, "paths": KERNELS}},
    "freezing": {"freeze": ("layers.w", "ends")},
    "average of parameters": {"ema": 0.5},
    "pruning": {"prune": PRUNED, "num_steps": 2},
    "clipping": {"clip_norm": 0.01},
    "optimizer of a config": {"tx": AdamW(lr=0.1, weight_decay=0.1, clip_norm=0.5), "num_steps": 2},
    "optimizer on the host": {"offload_optimizer": True},
    "master copy": {"params_dtype": jnp.float32, "master_dtype": jnp.float64, "accum_dtype": np.float64},
    "stochastic rounding": {"params_dtype": jnp.bfloat16, "rounding": "stochastic"},
    "products in int8": {"number_format": "int8"},
    "products in fp8": {"number_format": "fp8"},
    "declared reduction": {"parallel": {"gradient_reduction": Reduce(algorithm="ring", bucket_bytes="3KiB")}},
    "local updates": {"parallel": {"local": {"axis": "replica", "every": 2}}, "num_steps": 2},
}
SAMPLE = {"LoRA", "local updates"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SAMPLE else pytest.mark.slow) for n in STRATEGIES])
def test_a_strategy_in_stages_is_that_without(name):
    options = STRATEGIES[name]
    in_slices = "slices " if name == "local updates" else ""
    more = {"num_microbatches": 4} if name.startswith("products") else {}  # weights are scaled for each microbatch
    losses, state = steps(made(f"{in_slices}in stages" if in_slices else "stages", "zb_h1", **options))
    expected, wanted = steps(made(f"{in_slices}apart", **options, **more))
    assert np.abs(np.array(losses) - expected).max() < 1e-10
    assert difference(jax.device_get(state.params), jax.device_get(wanted.params)) < 1e-10


ROUNDED = {"reduction in 1 bit": "onebit", "reduction by PowerSGD": "powersgd"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUNDED)
def test_what_stages_send_and_keep_is_the_exact_gradient(name):
    reducing = made("slices in stages", "zb_h1", parallel={"gradient_reduction": Reduce(across=ROUNDED[name])})
    state, batch = reducing.compile_init()(), batches()[0]
    given = (state.params, with_rows(reducing.put(batch)), np.int32(0), state.carried)
    found = jax.device_get(jax.jit(reducing.gradients)(*given))
    exact = jax.grad(lambda params: loss(params, batch, None)[0])(jax.device_get(state.params))
    lost = jax.tree.map(lambda x: np.sum(x, 0), found.carried[REDUCE]["lost"])
    both = jax.tree.map(lambda grad, error: grad + error / found.tokens, found.grads, lost)
    assert difference(both, exact) < 1e-6 < difference(found.grads, exact)  # errors are stored in float32


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "overlapped products": ({"tensor": {"overlap": "ring"}}, "stages run different operations at a time"),
    "gathers beside products": ({"fsdp": {"overlap": "ring"}}, "stages run different operations at a time"),
    "exchange of tokens": ({"expert": "gather"}, "the rules do not shard experts over an axis of the batch"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_strategy_that_stages_do_not_have_is_refused(name):
    parallel, why = REFUSED[name]
    with pytest.raises(MeshparError, match=why):
        made("stages", "zb_h1", parallel=parallel)


# Schedules and checkpoints -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("then", "kind"), [("more stages", "1f1b"), ("stages", "interleaved"), ("apart", None)])
def test_a_checkpoint_resumes_on_another_cut(then, kind, tmp_path):
    """Layers that stages dealt out go on in the model's order, on other stages, or on none."""
    expected = steps(made("apart"), num=3)[1]
    first, second = made("stages", "zb_h1", cut=(3, 1)), made(then, kind)
    _, state = steps(first, num=1)
    with checkpoints(tmp_path / "saved") as saved:
        saved.save(1, state)
        saved.wait()
        restored = saved.restore(second.placement.structs)
    found = steps(second, restored, start=1)[1]
    assert difference(jax.device_get(found.params), jax.device_get(expected.params)) < 1e-10


@pytest.mark.slow
def test_a_schedule_from_a_file_runs_a_users_model(tmp_path):
    orders = [[str(op) for op in order] for order in get_schedule("zb_h2", 2, 4).orders(2)]
    (tmp_path / "orders.txt").write_text("\n".join(map(" ".join, orders)))
    written = ScheduleFile(num_microbatches=4, path=tmp_path / "orders.txt")
    found = steps(made("stages", parallel={"pipeline": written}))[1]
    wanted = steps(made("apart"))[1]
    assert difference(jax.device_get(found.params), jax.device_get(wanted.params)) < 1e-10


def test_pipedream_2bw_takes_a_users_gradients_at_the_weights_before_the_last_update():
    _, state = steps(made("stages", "pipedream_2bw", optax.sgd(0.1)), num=3)
    first = made("apart").compile_init(QUICK)().params
    weights = [jax.device_get(first)] * 2
    for batch in batches():
        grads = jax.grad(lambda params: loss(params, batch, None)[0])(weights[-2])  # noqa: B023
        weights.append(jax.device_get(jax.tree.map(lambda p, g: p - 0.1 * g, weights[-1], grads)))
    assert difference(jax.device_get(state.params), weights[-1]) < 1e-10


# The guide -----------------------------------------------------------------------------------------------------------


def test_the_guide_has_each_strategy():
    page = (Path(__file__).parents[2] / "docs" / "guides" / "pipeline-your-model.md").read_text()
    table = re.findall(r"^\| ([^|]+) \| (works|refused)", page, re.MULTILINE)
    assert dict(table) == {
        **dict.fromkeys([*STRATEGIES, *ROUNDED], "works"),
        **dict.fromkeys(
            ["checkpoints on another cut", "a schedule from a file", "pipedream_2bw", "rows in shards"], "works"
        ),
        **dict.fromkeys(REFUSED, "refused"),
    }
