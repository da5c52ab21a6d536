"""A user's own decoder generates on any mesh the tokens of a greedy loop in plain Flax."""

from __future__ import annotations

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from meshpar import CausalModel, ConfigError, MeshLayout, generate
from meshpar.serve.sampling import Sampling
from meshpar.serve.scheduler import Request, Scheduler
from tests.zoo import explicit_llama
from tests.zoo.decoders import DECODERS
from tests.zoo.parts import SEQ

PROMPTS = [[5, 9, 2], [7], [11, 3, 8, 1, 40], [2, 2]]
NEW = 6
MESHES = {
    "data2_tensor2": ("data=2 tensor=2", ["megatron"], "manual"),
    "fsdp4": ("fsdp=4", ["fsdp"], "manual"),
    "tensor4_auto": ("tensor=4", ["megatron"], "auto"),
}
CI = {("linen", "data2_tensor2"), ("nnx", "fsdp4"), ("own_methods", "data2_tensor2")}
CASES = [
    pytest.param(model, mesh, marks=[] if (model, mesh) in CI else [pytest.mark.slow], id=f"{model}-{mesh}")
    for model in DECODERS
    for mesh in MESHES
]


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def forward(model, params, tokens):
    return model(tokens) if isinstance(model, nnx.Module) else model.apply({"params": params}, tokens)


@lru_cache
def greedy(name: str) -> list[list[int]]:
    """The loop that a user writes: each token from the whole row before it."""
    model, params, _ = DECODERS[name]()
    following = jax.jit(lambda row, last: jnp.argmax(forward(model, params, row)[0, last]))
    answers = []
    for prompt in PROMPTS:
        row = list(prompt)
        for _ in range(NEW):
            padded = jnp.array([row + [0] * (16 - len(row))])
            row.append(int(following(padded, len(row) - 1)))
        answers.append(row[len(prompt) :])
    return answers


def adopted(name: str, mesh: str = "data2_tensor2", **more) -> CausalModel:
    model, params, dims = DECODERS[name]()
    sizes, presets, lowering = MESHES[mesh]
    layout = MeshLayout.of(sizes)
    built = layout.build(jax.devices()[: layout.requested()])
    return CausalModel.of(model, params, mesh=built, rules=presets, dims=dims, lowering=lowering, **more)


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_with_a_cache_tokens_are_those_of_a_plain_loop(name, mesh):
    generated = generate(adopted(name, mesh), PROMPTS, max_tokens=NEW)
    assert [one.tokens for one in generated.completions] == greedy(name)
    assert "with the model's own cache" in str(generated)
    assert generated.cache_bytes > 0


@pytest.mark.parametrize(
    "mesh", [m if m == "data2_tensor2" else pytest.param(m, marks=pytest.mark.slow) for m in MESHES]
)
def test_without_a_cache_tokens_are_the_same_and_it_says_so(mesh):
    generated = generate(adopted("linen", mesh, cache=False), PROMPTS, max_tokens=NEW)
    assert [one.tokens for one in generated.completions] == greedy("linen")
    assert "each token recomputes its row, without a cache" in str(generated)
    assert generated.cache_bytes == 0


def test_heads_of_a_cache_are_sharded_as_the_heads_that_fill_it():
    cache = adopted("linen").decoding(num_rows=4, max_len=12, chunk=4).pages
    assert cache["attention"]["cached_key"].axes == (("data",), (), (), ("tensor",), ())


def served(model: CausalModel, prompts, slots: int, **how) -> list[list[int]]:
    """The answers of the engine to requests that come one after another, for which there are too few slots."""
    engine = model.engine(slots, max(map(len, prompts)) + NEW, chunk=2)
    scheduler = Scheduler(engine.decoding.capacity)
    waiting = [Request(prompt=p, max_tokens=NEW, sampling=Sampling(**how), index=i) for i, p in enumerate(prompts)]
    answers: dict[int, list[int]] = {id(request): [] for request in waiting}
    order = list(answers)
    while waiting or not scheduler.is_idle:
        if waiting:
            scheduler.submit([waiting.pop(0)])
        plan = scheduler.plan()
        for one in scheduler.advance(plan, engine.run(plan)):
            answers[id(one.request)].append(one.token)
            if len(answers[id(one.request)]) == NEW:
                scheduler.end(one.request)
    return [answers[key] for key in order]


def test_a_server_answers_as_the_plain_loop():
    assert served(adopted("own_methods"), PROMPTS, slots=2) == greedy("own_methods")


@pytest.mark.parametrize("cache", [True, False])
def test_scores_are_the_models_own_log_probabilities(cache):
    model, params, _ = DECODERS["own_methods"]()
    engine = adopted("own_methods", cache=cache).engine(2, 12, chunk=2)
    request = Request(prompt=PROMPTS[0], max_tokens=NEW, scores=True)
    scheduler = Scheduler(engine.decoding.capacity)
    scheduler.submit([request])
    row = list(PROMPTS[0])
    for _, token, score in scheduler.answered(engine.run):
        expected = np.asarray(jax.nn.log_softmax(forward(model, params, jnp.array([row]))[0, -1]))
        assert (token, score.ids[0]) == (expected.argmax(), token)
        assert score.logprob == pytest.approx(expected.max(), abs=1e-5)
        row.append(token)
        if len(row) == len(PROMPTS[0]) + NEW:
            scheduler.end(request)
    assert len(row) == len(PROMPTS[0]) + NEW


def test_draws_are_the_same_on_any_mesh_and_without_a_cache():
    how = {"temperature": 1.3, "top_k": 9, "seed": 3}
    drawn = served(adopted("own_methods"), PROMPTS, slots=2, **how)
    assert drawn != greedy("own_methods")
    assert drawn == served(adopted("own_methods", "fsdp4", cache=False), PROMPTS, slots=4, **how)


def test_a_model_for_explicit_axes_recomputes_its_rows():
    zoo = explicit_llama.build()
    explicit = (jax.sharding.AxisType.Explicit,) * 3
    with jax.set_mesh(jax.make_mesh((1, 1, 1), ("x", "y", "z"), explicit, devices=jax.devices()[:1])):
        params = jax.device_get(jax.jit(zoo.init)(jax.random.key(0)))
        first = jax.jit(explicit_llama.forward)(np.array([[3, 4, 5, *[0] * (SEQ - 3)]]), params)[0, 2].argmax()
    model = CausalModel.of(
        lambda params, tokens: explicit_llama.forward(tokens, params), params, axes=zoo.axes,
        mesh="data=2 tensor=2 context=2", rules={"preset": "replicated", "unnamed": []},
        dims={"**.q": ("unnamed", "y+z", "unnamed"), "lm_head": ("unnamed", "y+z")},
    )  # fmt: skip
    found = generate(model, [[3, 4, 5]], max_tokens=SEQ - 3).completions[0].tokens
    assert found[0] == first


class Explicit:
    """Attention with a cache, in JAX's explicit mode: rows are sharded over `data`, and heads over `tensor`."""

    heads = P("data", None, "tensor", None)

    def projected(self, params, tokens, positions):
        x = params["embed"].at[tokens].get(out_sharding=P("data", None, None))
        x = x + params["positions"].at[positions].get(out_sharding=P(None, None))
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, params[name], out_sharding=self.heads) for name in "qkv")
        return x, q, k, v

    def attended(self, params, x, q, k, v, is_visible):
        scores = jnp.einsum("bthk,bshk->bhts", q, k, out_sharding=P("data", "tensor", None, None))
        weights = jax.nn.softmax(jnp.where(is_visible, scores, -1e9))
        y = jnp.einsum("bhts,bshk->bthk", weights, v, out_sharding=self.heads)
        x = jnp.tanh(x + jnp.einsum("bthk,hkd->btd", y, params["o"], out_sharding=P("data", None, None)))
        return jnp.einsum("btd,vd->btv", x, params["embed"], out_sharding=P("data", None, None))

    def __call__(self, params, tokens):
        length = tokens.shape[1]
        is_visible = jnp.tril(jnp.ones((length, length), bool))
        return self.attended(params, *self.projected(params, tokens, jnp.arange(length)), is_visible)

    def init_cache(self, params, batch_size, length):
        empty = jnp.zeros((batch_size, length, 4, 4), out_sharding=self.heads)
        return {"k": empty, "v": empty, "end": jnp.zeros((), jnp.int32)}

    def decode(self, params, tokens, cache):
        end = cache["end"]
        x, q, k, v = self.projected(params, tokens, end[None])
        k, v = (jax.lax.dynamic_update_slice_in_dim(cache[name], one, end, 1) for name, one in (("k", k), ("v", v)))
        logits = self.attended(params, x, q, k, v, jnp.arange(k.shape[1]) <= end)
        return logits, {"k": k, "v": v, "end": end + 1}


def test_a_model_for_explicit_axes_decodes_with_its_cache():
    """Its rows are of one sequence each, which no axis divides. Without a cache it computes the same tokens."""
    draw = np.random.default_rng(0)
    sizes = {"embed": (32, 16), "positions": (16, 16), "o": (4, 4, 16)} | dict.fromkeys("qkv", (16, 4, 4))
    params = {name: draw.normal(size=size).astype("f") for name, size in sizes.items()}
    dims = {"embed": ("vocab", "embed"), "o": ("heads", "head_dim", "embed")}
    dims |= dict.fromkeys("qkv", ("embed", "heads", "head_dim"))
    plain = {"mesh": "data=4 tensor=2", "rules": {"preset": ["megatron"], "vocab": [], "unnamed": []}, "dims": dims}
    prompts = [[3, 4, 5], [7, 8, 9, 10]]
    found = {}
    for cache in (Explicit(), False):
        model = CausalModel.of(Explicit().__call__, params, cache=cache, **plain)
        found[bool(cache)] = generate(model, prompts, max_tokens=NEW)
    assert [one.tokens for one in found[True].completions] == [one.tokens for one in found[False].completions]
    assert "with the model's own cache" in str(found[True]) and found[True].cache_bytes > 0


def test_a_module_that_takes_more_than_tokens_is_refused():
    model = CausalModel.of(lambda params, tokens, mask: tokens, {"w": np.ones(2, "float32")})
    with pytest.raises(ConfigError, match=r"the model cannot be called with its parameters and tokens alone: .*mask"):
        generate(model, [[1]], max_tokens=1)


# Planted faults -----------------------------------------------------------------------------------------------------


class Stale:
    """A cache that forgets what it was given after the first token."""

    def __init__(self, decoding):
        self.decoding = decoding
        self.init_cache = decoding.init_cache

    def decode(self, params, tokens, cache):
        logits, new = self.decoding.decode(params, tokens, cache)
        return logits, jax.tree.map(lambda old, new: jnp.where(cache["end"][0] > 0, old, new), cache, new)


def test_a_planted_stale_cache_is_found():
    stale = Stale(adopted("own_methods").functions.decoding)
    with pytest.raises(ConfigError, match=r"with its cache the model has other logits .*: at token 2 they differ by"):
        generate(adopted("own_methods", cache=stale), PROMPTS, max_tokens=NEW)
