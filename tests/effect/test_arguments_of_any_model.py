"""No argument of `training`, and no key of `Parallel`, is without effect on a vision transformer, T5 or GShard.

It changes the traced programs or the shardings, or it is refused by name. The arguments are those of the signature, the
keys those of the schema: a new one is walked on the day that it is added. CI tries a sample.
"""

from __future__ import annotations

import random
from functools import cache
from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from meshpar import MeshLayout, MeshparError, Parallel, Reduce, training
from meshpar.interop.specs import specs_of
from meshpar.optim import AdamW, Cosine
from meshpar.train.training import Training
from meshpar.tree import flatten_with_paths
from tests.effect.files import written
from tests.effect.fingerprint import of_training
from tests.effect.walk import EXCEPTIONS, KEYS, SECTIONS, change
from tests.equivalence import strategies
from tests.equivalence.strategies import KERNELS, ROWS

model = cache(strategies.model.__wrapped__)  # in float32, and the models of equivalence are in float64
MODELS = ("vit", "t5", "gshard")
KEYS_OF_PARALLEL = [
    key for key in KEYS if SECTIONS[key.split(".")[0]].path.startswith("parallel") and key not in EXCEPTIONS
]


def halved(name: str) -> Any:
    def loss(*arguments: Any) -> Any:
        found = model(name)[0].loss(*arguments)
        return 0.5 * (found[0] if isinstance(found, tuple) else found)

    return loss


def carrying(name: str) -> Any:
    """A loss that counts its calls, if it is given what it carries."""

    def loss(params: Any, batch: Any, key: Any, *carried: Any) -> Any:
        mean = halved(name)(params, batch, key)
        return (mean, {}, {"n": carried[0]["n"] + 1}) if carried else mean

    return loss


def drawing(name: str) -> Any:
    def loss(params: Any, batch: Any, key: Any) -> Any:
        return halved(name)(params, batch, key) * (1 if key is None else jax.random.uniform(key))

    return loss


def comparing(name: str) -> Any:
    """A loss that compares each row with each other row, so a device needs all."""

    def loss(params: Any, batch: Any, key: Any) -> Any:
        rows = next(iter(batch.values())).reshape(ROWS, -1).astype(jnp.float32)
        return halved(name)(params, batch, key) + (rows @ rows.T).mean()

    return loss


def first(name: str) -> str:
    """A glob of parameters."""
    return KERNELS[name][0] + "**"


def named(name: str) -> dict[str, Any]:
    """The dims of all arrays, of which those that the model has have its own name of an axis."""
    specs, _, _ = specs_of(model(name)[0].init, None, 0, model(name)[0].dims, None)
    every = flatten_with_paths(specs).items()
    return {path: tuple({"mlp": "tp"}.get(dim, dim) for dim in spec.dims) for path, spec in every}


def short(name: str, rows: int) -> dict[str, Any]:
    return {key: x[:rows] for key, x in model(name)[0].batch.items()}


CHANGES: dict[str, Any] = {
    "init": lambda name: ({}, lambda key: jax.tree.map(jnp.zeros_like, model(name)[0].init(key))),
    "loss": lambda name: ({}, halved(name)),
    "tx": lambda name: ({}, optax.adam(0.1)),
    "batch": lambda name: ({}, short(name, 8)),
    "mesh": lambda name: ({}, MeshLayout(data=4, tensor=2)),
    "rules": lambda name: ({}, {"preset": ["zero1", "megatron"], **model(name)[0].rules}),
    "dims": lambda name: ({}, dict.fromkeys(KERNELS[name], ("embed", "embed", "mlp", "mlp"))),
    "batch_dims": lambda name: ({}, {key: ("",) * x.ndim for key, x in short(name, 1).items()}),
    "activation_dims": lambda name: ({}, ("height",)),
    "axes": lambda name: ({"dims": named(name)}, {"tp": "tensor"}),
    "carried": lambda name: ({"loss": carrying(name)}, lambda key: {"n": jnp.zeros(())}),
    "evaluation": lambda name: ({}, halved(name)),
    "draws": lambda name: ({"loss": drawing(name)}, True),
    "seed": lambda name: ({"draws": True}, 1),
    "lowering": lambda name: ({}, "auto"),
    "strict": lambda name: ({"loss": comparing(name)}, True),
    "manual": lambda name: ({"rules": replicated(name), "mesh": MeshLayout(data=8)}, True),
    "parallel": lambda name: ({}, Parallel(gradient_reduction=Reduce(across="int8"))),
    "compute_dtype": lambda name: ({}, jnp.bfloat16),
    "accum_dtype": lambda name: ({"num_microbatches": 2}, jnp.bfloat16),
    "num_microbatches": lambda name: ({}, 2),
    "number_format": lambda name: ({}, "int8"),
    "num_steps": lambda name: ({"tx": AdamW(lr=0.1, schedule=Cosine()), "num_steps": 10}, 20),
    "lora": lambda name: ({}, {"rank": 1, "paths": KERNELS[name]}),
    "freeze": lambda name: ({}, first(name)),
    "prune": lambda name: (
        {"num_steps": 10},
        {"kind": "magnitude", "sparsity": 0.5, "paths": [first(name)], "every": 1, "times": 1},
    ),
    "clip_norm": lambda name: ({}, 0.5),
    "ema": lambda name: ({}, 0.9),
    "params_dtype": lambda name: ({}, jnp.bfloat16),
    "master_dtype": lambda name: ({"params_dtype": jnp.bfloat16}, jnp.float32),
    "rounding": lambda name: ({"params_dtype": jnp.bfloat16}, "stochastic"),
    "offload_optimizer": lambda name: ({"tx": optax.sgd(0.1, momentum=0.9)}, True),
}
"""Argument -> (model -> others that it needs, another value)."""


def replicated(name: str) -> dict[str, Any]:
    return {"preset": ["replicated"], **model(name)[0].rules}


@pytest.fixture(scope="module", autouse=True)
def _files(tmp_path_factory):
    """The files that values of keys name, in the working directory."""
    folder = tmp_path_factory.mktemp("effect")
    written(folder)
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        patch.chdir(folder)
        yield
    observed.cache_clear()


def base(name: str) -> dict[str, Any]:
    zoo, _ = model(name)
    return {
        "init": zoo.init, "loss": zoo.loss, "tx": optax.sgd(0.1), "batch": dict(zoo.batch), "dims": zoo.dims,
        "mesh": MeshLayout(data=2, fsdp=2, tensor=2), "rules": {"preset": ["fsdp", "megatron"], **zoo.rules},
    }  # fmt: skip


def of_key(name: str, key: str, changed: bool) -> dict[str, Any]:
    """The arguments that a config's change of a key of `Parallel` is in Python."""
    found = change(key, "import", "manual")
    run = found.after if changed else found.before
    if key == "Parallel.fsdp" and changed:  # its own other value, `prefetch`, is an option of GPUs' and TPUs' compilers
        run = run | {"parallel": {"fsdp": {"overlap": "ring"}}}
    if "megatron_sp" in run["rules"]["preset"] or "context" in run["rules"]["preset"]:
        dims = {key: ("batch", "seq") for key, x in model(name)[0].batch.items() if x.ndim == 2}
    else:
        dims = {}
    return {
        "mesh": run["mesh"], "rules": run["rules"] | dict(model(name)[0].rules), "batch_dims": dims, "num_steps": 8,
        "parallel": Parallel.model_validate(run.get("parallel", {})), "tx": AdamW(lr=1e-3),
    }  # fmt: skip


def of_argument(name: str, argument: str, changed: bool) -> dict[str, Any]:
    others, value = CHANGES[argument](name)
    return others | ({argument: value} if changed else {})


@cache
def observed(name: str, what: str, changed: bool) -> Any:
    """The programs and the shardings of a training; the message, if it is refused."""
    try:
        given = (of_key if "." in what else of_argument)(name, what, changed)
        return of_training(training(**base(name) | given))
    except (MeshparError, ValueError) as error:
        return f"refused: {error}"


def plain(name: str, what: str) -> Any:
    """Arguments that need nothing beside them share one observation."""
    alone = "." not in what and not CHANGES[what](name)[0]
    return observed(name, "tx" if alone else what, False)


def assert_effect(name: str, what: str) -> None:
    """It has an effect; or it, or the section of which it is a key, or what that needs, is refused by name."""
    before, after = plain(name, what), observed(name, what, True)
    path = change(what, "import", "manual").path if "." in what else what
    named = [path, path.rpartition(".")[0], path.rpartition(".")[2], "microbatches)"]
    if str(after).startswith("refused"):
        needs = "." in what and str(before).startswith("refused")  # such as a pipeline, which has no layers to cut
        assert needs or any(one and one in after for one in named), after
    else:
        assert before != after


CASES = [(name, what) for name in MODELS for what in [*CHANGES, *KEYS_OF_PARALLEL]]
SAMPLED = random.Random(1).sample([case for case in CASES if case[0] == "gshard"], 5)
SAMPLED.append(("gshard", "params_dtype"))  # bfloat16 was not taken for a float


def test_each_argument_is_in_the_list():
    assert {*signature(training).parameters} == {*CHANGES}


@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=[] if one in SAMPLED else [pytest.mark.slow]) for one in CASES], ids="-".join
)
def test_an_argument_has_an_effect_or_is_refused_by_name(case):
    assert_effect(*case)


def test_rows_that_microbatches_of_stages_do_not_divide_are_refused():
    found = observed("gshard", "Parallel.pipeline", True)
    assert "16 rows cannot be cut into 64 equal parts (4 devices x 16 microbatches)" in found


def test_control_a_strategy_that_is_not_checked_is_found(monkeypatch):
    """Experts that are written with one-hots exchange no tokens."""
    observed.cache_clear()
    monkeypatch.setattr(Training, "check_strategies", lambda self: None)
    with pytest.raises(AssertionError):
        assert_effect("gshard", "ExpertParallel.kind")
    observed.cache_clear()
