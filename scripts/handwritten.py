"""The quickstart's llama without a framework, as it is usually written: one `jax.jit`, a scan over layers.

`byhand` is the fastest program that we can write; this one uses only explicit shardings.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

BATCH = ("data", "fsdp")


def specs():
    """How each parameter is sharded: fsdp on embed, tensor on heads, mlp and vocab."""
    heads = P(None, "fsdp", "tensor")
    out = P(None, "tensor", None, "fsdp")
    layer = {
        "q": heads,
        "k": heads,
        "v": heads,
        "o": out,
        "gate": heads,
        "up": heads,
        "down": P(None, "tensor", "fsdp"),
    }
    norms = {"attn_norm": P(None, "fsdp"), "mlp_norm": P(None, "fsdp")}
    return {"table": P("tensor", "fsdp"), "layers": layer | norms, "norm": P("fsdp"), "head": P("fsdp", "tensor")}


def init(model, mesh):
    """Initializes sharded parameters; their values do not affect the timing."""
    L = model.num_layers
    D = model.hidden_size
    H = model.num_heads
    K = model.kv_heads
    h = model.head_size
    M = model.intermediate_size
    V = model.padded_vocab
    shapes = {
        "table": (V, D), "norm": (D,), "head": (D, V),
        "layers": {
            "q": (L, D, H, h), "k": (L, D, K, h), "v": (L, D, K, h), "o": (L, H, h, D), "gate": (L, D, M),
            "up": (L, D, M), "down": (L, M, D), "attn_norm": (L, D), "mlp_norm": (L, D),
        },
    }  # fmt: skip
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs())

    def draw(shape):
        return jax.random.normal(jax.random.key(0), shape) * 0.02

    @partial(jax.jit, out_shardings=shardings)
    def make():
        return jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))

    return make()


def norm(x, scale):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype) * scale


def rotate(x, positions):
    half = x.shape[-1] // 2
    angle = positions[..., None, None] * 10000.0 ** (-jnp.arange(half) / half)
    a = x[..., :half]
    b = x[..., half:]
    cos = jnp.cos(angle)
    sin = jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def scored(q, k, v, visible):
    """Attention that holds all scores."""
    q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3]) * q.shape[3] ** -0.5
    scores = jnp.einsum("bskgh,btkh->bkgst", q, k).astype(jnp.float32)
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    out = jnp.einsum("bkgst,btkh->bskgh", jax.nn.softmax(scores).astype(v.dtype), v)
    return out.reshape(*out.shape[:2], -1, out.shape[-1])


def fused(q, k, v, visible):
    """cuDNN's flash attention, for rows of one document."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def layer(pin, batch, visible, x, w, attend=scored):
    """One block. `pin(x, *spec)` constrains the sharding of an activation."""
    y = norm(x, w["attn_norm"])
    q, k, v = (jnp.einsum("bsd,dhk->bshk", y, w[name]) for name in "qkv")
    q = rotate(q, batch["positions"])
    k = rotate(k, batch["positions"])
    x += jnp.einsum("bshk,hkd->bsd", attend(pin(q, BATCH, None, "tensor"), k, v, visible), w["o"])
    y = norm(x, w["mlp_norm"])
    hidden = pin(jax.nn.silu(y @ w["gate"]) * (y @ w["up"]), BATCH, None, "tensor")
    return pin(x + hidden @ w["down"], BATCH), None


def whole_loss(params, batch, *, mesh, vocab_size, remat="none", attend=scored):
    """Mean cross entropy over the targets that are not -1."""
    index = jnp.arange(batch["tokens"].shape[1])
    visible = (index[:, None] >= index) & (batch["segments"][:, :, None] == batch["segments"][:, None, :])
    table = jax.lax.with_sharding_constraint(params["table"], NamedSharding(mesh, P("tensor")))

    def pin(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    body = partial(layer, pin, batch, visible, attend=attend)
    if remat == "dots_no_batch":
        body = jax.checkpoint(
            body, policy=jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims, prevent_cse=False
        )
    x, _ = jax.lax.scan(body, table[batch["tokens"]], params["layers"])
    # x is finite. Otherwise XLA:CPU would sum the count over devices while the scan still runs on some, and hang.
    targets = jnp.where(jnp.isfinite(x[..., 0]), batch["targets"], -1)
    total, count = cross_entropy(params, x, targets, vocab_size)
    return total / count


def cross_entropy(params, x, targets, vocab_size):
    """The sum over the targets that are not -1, and their number."""
    logits = (norm(x, params["norm"]) @ params["head"]).astype(jnp.float32)
    logits = jnp.where(jnp.arange(logits.shape[-1]) < vocab_size, logits, -jnp.inf)
    counted = targets >= 0
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(counted, targets, 0))
    return jnp.where(counted, nll, 0).sum(), counted.sum()


def compile_step(model, mesh, params, batch, learning_rate, compute=jnp.float32, loss=None):
    """A donated, compiled AdamW step with clipping, and its optimizer state.

    `loss` maps (params, batch) to a mean; default: that of `whole_loss`.
    """
    loss = loss or partial(whole_loss, mesh=mesh, vocab_size=model.vocab_size, remat=model.remat.policy)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(learning_rate, weight_decay=0.1))
    shardings = jax.tree.map(lambda x: x.sharding, params)
    opt_shardings = optax.tree.map_params(
        tx, lambda _, s: s, jax.eval_shape(tx.init, params), shardings,
        transform_non_params=lambda _: NamedSharding(mesh, P()),
    )  # fmt: skip
    opt_state = jax.jit(tx.init, out_shardings=opt_shardings)(params)

    def step(params, opt_state, batch):
        def objective(params):
            cast = jax.tree.map(lambda x: x.astype(compute), params)
            return loss(cast, batch)

        value, grads = jax.value_and_grad(objective)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    whole = NamedSharding(mesh, P())
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(shardings, opt_shardings, whole))
    return jitted.lower(params, opt_state, batch).compile(), opt_state
