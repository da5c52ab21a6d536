"""Models that use nothing of meshpar's, as their users write them: Linen and NNX, with names of dims and without."""

from __future__ import annotations

from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax import nnx
from jax.sharding import PartitionSpec as P

from meshpar import AxisRules, training

ROWS = 16
SEQ = 6
WIDTH = 16
MLP = 32
HEADS = 4
VOCAB = 24
LAYERS = 3
EXPERTS = 4
STANDARD = {"unnamed": ()}


def named(*names):
    return nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)


def kernel(*names):
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)


def numbers(seed):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(ROWS, WIDTH)).astype("f"), "y": rng.integers(0, VOCAB, ROWS, np.int32)}


def sentences(seed):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (ROWS, SEQ + 1), np.int32)
    return {"source": tokens[::-1, :-1].copy(), "tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def images(seed):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(ROWS, 6, 6, 1)).astype("f"), "y": rng.integers(0, 10, ROWS, np.int32)}


def nll(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


# --- an MLP with dropout, in NNX


class MLPModel(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, MLP, kernel_init=kernel("embed", "mlp"), rngs=rngs)
        self.dropout = nnx.Dropout(0.2)
        self.down = nnx.Linear(MLP, VOCAB, kernel_init=kernel("mlp", "classes"), rngs=rngs)

    def __call__(self, x, rngs):
        return self.down(self.dropout(nnx.gelu(self.up(x)), deterministic=rngs is None, rngs=rngs))


def mlp(mesh, rules):
    """Several optimizers by path, and metrics beside the loss."""
    graph = abstract(MLPModel)

    def loss(params, batch, key):
        logits = nnx.merge(graph, params)(batch["x"], key if key is None else nnx.Rngs(dropout=key))
        hits = (logits.argmax(-1) == batch["y"]).astype(logits.dtype)
        return nll(logits, batch["y"]).mean(), {"accuracy": hits.mean()}

    def which(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: "slow" if "down" in str(path) else "fast", params)

    tx = optax.partition({"fast": optax.adamw(1e-2), "slow": optax.sgd(1e-3, 0.9)}, which)

    def init(key):
        return nnx.state(MLPModel(nnx.Rngs(key)), nnx.Param)

    return training(init, loss, tx, numbers(0), mesh=mesh, rules=rules | AxisRules(classes=(), **STANDARD), draws=True)


def abstract(make):
    with nnx.use_eager_sharding(False):
        return nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0))))


# --- a convolutional net with batch norm, in Linen


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        for channels in (8, 16):
            x = nn.Conv(channels, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return nn.Dense(10)(x.mean((1, 2)))


def conv_net(mesh, rules):
    """Its batch statistics are those of the rows on all devices."""

    def variables(key):
        return ConvNet().init(key, jnp.ones((1, 6, 6, 1)), train=False)

    def loss(params, batch, key, carried):
        logits, carried = ConvNet().apply(
            {"params": params, **carried}, batch["x"], train=True, mutable=["batch_stats"]
        )
        return nll(logits, batch["y"]).mean(), {}, carried

    dims = {"**Conv_*.kernel": ("height", "width", "embed", "mlp"), "**Dense_0.kernel": ("mlp", "classes")}
    rules = AxisRules.model_validate(rules.model_dump() | {"embed": (), "mlp": filters(rules)})
    rules |= AxisRules(height=(), width=(), classes=(), **STANDARD)
    return training(
        lambda key: variables(key)["params"], loss, optax.sgd(0.1, 0.9), images(0), mesh=mesh, rules=rules, dims=dims,
        carried=lambda key: {"batch_stats": variables(key)["batch_stats"]},
    )  # fmt: skip


def filters(rules):
    """The axes over which a convolution's filters are sharded: all that shard the other kernels."""
    return rules["mlp"] + rules["embed"]


# --- a decoder of layers stacked by nn.scan, in Linen


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        def dense(*names):
            return {"kernel_init": named(*names), "use_bias": False}

        normed = nn.LayerNorm(use_bias=False)(x)
        heads = [
            nn.DenseGeneral((HEADS, WIDTH // HEADS), name=name, **dense("embed", "heads", "head_dim"))(normed)
            for name in "qkv"
        ]
        attended = nn.dot_product_attention(*heads, mask=mask)
        x += nn.DenseGeneral(WIDTH, axis=(-2, -1), name="o", **dense("heads", "head_dim", "embed"))(attended)
        hidden = nn.gelu(nn.Dense(MLP, **dense("embed", "mlp"))(nn.LayerNorm(use_bias=False)(x)))
        hidden = nn.with_logical_constraint(hidden, ("batch", "seq", "mlp"))
        return x + nn.Dense(WIDTH, **dense("mlp", "embed"))(hidden), None


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        table = nn.Embed(VOCAB, WIDTH, embedding_init=named("vocab", "embed"))
        layers = nn.scan(
            Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS, in_axes=nn.broadcast,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )  # fmt: skip
        x, _ = layers(name="layers")(table(tokens), nn.make_causal_mask(tokens))
        return table.attend(nn.LayerNorm()(x))


def transformer(mesh, rules):
    """Its embedding is frozen."""

    def loss(params, batch, key):
        return nll(Decoder().apply({"params": params}, batch["tokens"]), batch["targets"]).mean()

    def which(params):
        return {name: "frozen" if name == "Embed_0" else "trained" for name in params}

    tx = optax.partition({"trained": optax.adamw(1e-2), "frozen": optax.set_to_zero()}, which)

    def init(key):
        return Decoder().init(key, jnp.ones((1, SEQ), jnp.int32))["params"]

    return training(init, loss, tx, sentences(0), mesh=mesh, rules=rules | AxisRules(**STANDARD))


# --- an encoder and a decoder, in NNX


def attend(q, k, v, mask=None, **_):
    """Like `nnx.dot_product_attention`, which would compute the softmax in float32 even for float64."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    weights = nnx.softmax(scores if mask is None else jnp.where(mask, scores, -1e30))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


class Side(nnx.Module):
    """A layer that attends to itself, or to another sequence."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, decode=False, kernel_init=kernel("embed", "heads", "head_dim"),
            out_kernel_init=kernel("heads", "head_dim", "embed"), attention_fn=attend, rngs=rngs,
        )  # fmt: skip
        self.up = nnx.Linear(WIDTH, MLP, kernel_init=kernel("embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(MLP, WIDTH, kernel_init=kernel("mlp", "embed"), rngs=rngs)

    def __call__(self, x, other=None, mask=None):
        normed = self.norm(x)
        x += self.attention(normed, normed if other is None else other, mask=mask)
        return x + self.down(nnx.gelu(self.up(x)))


class EncoderDecoder(nnx.Module):
    def __init__(self, rngs):
        wide = jnp.result_type(float)  # nnx.Embed computes in the dtype in which it was made
        self.table = nnx.Embed(VOCAB, WIDTH, param_dtype=wide, embedding_init=kernel("vocab", "embed"), rngs=rngs)
        self.encoder = Side(rngs)
        self.decoder = Side(rngs)
        self.across = Side(rngs)

    def __call__(self, source, tokens):
        memory = self.encoder(self.table(source))
        x = self.decoder(self.table(tokens), mask=nnx.make_causal_mask(tokens))
        return self.table.attend(self.across(x, memory))


def encoder_decoder(mesh, rules):
    graph = abstract(EncoderDecoder)

    def loss(params, batch, key):
        return nll(nnx.merge(graph, params)(batch["source"], batch["tokens"]), batch["targets"]).mean()

    def init(key):
        return nnx.state(EncoderDecoder(nnx.Rngs(key)), nnx.Param)

    return training(init, loss, optax.lion(1e-3), sentences(0), mesh=mesh, rules=rules | AxisRules(**STANDARD))


# --- a mixture of experts, whose two layers share their experts, in Linen


class Expert(nn.Module):
    @nn.compact
    def __call__(self, x):
        hidden = nn.relu(nn.Dense(MLP, use_bias=False, kernel_init=named("embed", "mlp"))(x))
        return nn.Dense(WIDTH, use_bias=False, kernel_init=named("mlp", "embed"))(hidden)


class Mixture(nn.Module):
    @nn.compact
    def __call__(self, x):
        experts = nn.vmap(
            Expert, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=EXPERTS,
            metadata_params={nn.PARTITION_NAME: "experts"},
        )(name="experts")  # fmt: skip
        for i in range(2):
            gates = nn.softmax(nn.Dense(EXPERTS, name=f"gate{i}", kernel_init=named("embed", "gates"))(x))
            x += jnp.einsum("re,erd->rd", gates, experts(x))
        return nn.Dense(VOCAB, kernel_init=named("embed", "vocab"))(x)


def mixture(mesh, rules):
    def loss(params, batch, key):
        return nll(Mixture().apply({"params": params}, batch["x"]), batch["y"]).mean()

    def init(key):
        return Mixture().init(key, jnp.ones((1, WIDTH)))["params"]

    rules |= AxisRules(gates=(), **STANDARD)
    return training(init, loss, optax.adamw(1e-2), numbers(0), mesh=mesh, rules=rules)


# --- a recurrent net without a name, in Linen


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH)(tokens)
        wide = jnp.result_type(float)  # nn.RNN's first state has the dtype of the cell's parameters
        return nn.Dense(VOCAB)(nn.RNN(nn.GRUCell(MLP, param_dtype=wide))(x))


def unnamed(mesh, rules):
    def loss(params, batch, key):
        return nll(Recurrent().apply({"params": params}, batch["tokens"]), batch["targets"]).mean()

    dims = {
        "**.embedding": ("vocab", "embed"),
        "GRUCell_0.i*.kernel": ("embed", "mlp"),
        "GRUCell_0.h*.kernel": ("state", "mlp"),
        "**.kernel": ("mlp", "vocab"),
    }

    def init(key):
        return Recurrent().init(key, jnp.ones((1, SEQ), jnp.int32))["params"]

    tokens = sentences(0)
    vocab = {"vocab": ()}  # the other dim of the last kernel is sharded
    rules = AxisRules.model_validate(rules.model_dump() | vocab) | AxisRules(state=(), **STANDARD)
    return training(init, loss, optax.rmsprop(1e-3), tokens, mesh=mesh, rules=rules, dims=dims)


# --- batch norm and dropout in NNX, whose statistics, keys and counters the forward changes


class Regularized(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, MLP, kernel_init=kernel("embed", "mlp"), rngs=rngs)
        self.norm = nnx.BatchNorm(MLP, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.down = nnx.Linear(MLP, VOCAB, kernel_init=kernel("mlp", "classes"), rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(nnx.gelu(self.norm(self.up(x)))))


def regularized(mesh, rules):
    graph = abstract(Regularized)

    def state(key, *filters):
        return nnx.state(Regularized(nnx.Rngs(key)), *filters)

    def loss(params, batch, key, carried):
        model = nnx.merge(graph, params, carried)
        return nll(model(batch["x"]), batch["y"]).mean(), {}, nnx.state(model, nnx.Not(nnx.Param))

    return training(
        lambda key: state(key, nnx.Param), loss, optax.adamw(1e-2), numbers(0), mesh=mesh,
        rules=rules | AxisRules(classes=(), **STANDARD), carried=lambda key: state(key, nnx.Not(nnx.Param)),
    )  # fmt: skip


# --- a decoder in NNX that names the axes of a mesh of its own, as Flax's Gemma does


# v vocabulary, d width, n heads, h size of a head, f hidden size of the MLP, b rows, t tokens
OVER = SimpleNamespace(
    emb_vd=P("tp", "fsdp"),
    weight_dnh=P("fsdp", "tp", None),
    weight_nhd=P("tp", None, "fsdp"),
    ffw_df=P("fsdp", "tp"),
    ffw_fd=P("tp", "fsdp"),
    norm=P("tp"),
    act_btd=P("fsdp", None, "tp"),
    act_btf=P("fsdp", None, "tp"),
)


class Einsum(nnx.Module):
    def __init__(self, equation, shape, sharding, rngs):
        self.equation = equation
        self.w = nnx.Param(nnx.initializers.normal(0.2)(rngs.params(), shape), out_sharding=sharding)

    def __call__(self, x):
        return jnp.einsum(self.equation, x, self.w[...])


class Gemma(nnx.Module):
    def __init__(self, rngs):
        head = WIDTH // HEADS
        init = nnx.initializers.normal(0.2)
        self.table = nnx.Param(init(rngs.params(), (VOCAB, WIDTH)), out_sharding=OVER.emb_vd)
        self.scale = nnx.Param(jnp.ones(WIDTH), out_sharding=OVER.norm)
        for name in "qkv":
            setattr(self, name, Einsum("btd,dnh->btnh", (WIDTH, HEADS, head), OVER.weight_dnh, rngs))
        self.o = Einsum("btnh,nhd->btd", (HEADS, head, WIDTH), OVER.weight_nhd, rngs)
        self.up = nnx.Linear(
            WIDTH, MLP, use_bias=False, kernel_init=nnx.with_partitioning(init, OVER.ffw_df), rngs=rngs
        )
        self.down = Einsum("btf,fd->btd", (MLP, WIDTH), OVER.ffw_fd, rngs)

    def __call__(self, tokens):
        x = jax.lax.with_sharding_constraint(self.table[...][tokens], OVER.act_btd)
        x += self.o(attend(self.q(x), self.k(x), self.v(x), nnx.make_causal_mask(tokens)))
        hidden = jax.lax.with_sharding_constraint(nnx.gelu(self.up(x * self.scale[...])), OVER.act_btf)
        return (x + self.down(hidden)) @ self.table[...].T


def gemma(mesh, rules):
    graph = abstract(Gemma)

    def loss(params, batch, key):
        return nll(nnx.merge(graph, params)(batch["tokens"]), batch["targets"]).mean()

    return training(
        lambda key: nnx.state(Gemma(nnx.Rngs(key)), nnx.Param), loss, optax.adamw(1e-2), sentences(0), mesh=mesh,
        rules=rules | AxisRules(**STANDARD), axes={"tp": "tensor"},
    )  # fmt: skip


# --- a residual net whose batch norm was written for pmap, in Linen


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        def norm():
            return nn.BatchNorm(use_running_average=False, momentum=0.9, axis_name="batch")

        x = nn.Conv(8, (3, 3), use_bias=False)(x)
        x += nn.relu(norm()(nn.Conv(8, (3, 3), use_bias=False)(x)))
        return nn.Dense(10)(norm()(x).mean((1, 2)))


def resnet(mesh, rules):
    def variables(key):
        return ResNet().init(key, jnp.ones((1, 6, 6, 1)))

    def loss(params, batch, key, carried):
        logits, carried = ResNet().apply({"params": params, **carried}, batch["x"], mutable=["batch_stats"])
        return nll(logits, batch["y"]).mean(), {}, carried

    dims = {"**Conv_*.kernel": ("height", "width", "embed", "mlp"), "**Dense_0.kernel": ("mlp", "classes")}
    rules = AxisRules.model_validate(rules.model_dump() | {"embed": (), "mlp": filters(rules)})
    rules |= AxisRules(height=(), width=(), classes=(), **STANDARD)
    return training(
        lambda key: variables(key)["params"], loss, optax.sgd(0.1, 0.9), images(0), mesh=mesh, rules=rules, dims=dims,
        carried=lambda key: {"batch_stats": variables(key)["batch_stats"]},
    )  # fmt: skip


# --- a net whose activations alone have some names, in Linen


class UNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        names = ("activation_batch", "height", "width", None)
        init = named(None, None, "embed", "mlp")
        x = nn.with_logical_constraint(nn.gelu(nn.Conv(8, (3, 3), kernel_init=init)(x)), names)
        down = nn.max_pool(x, (2, 2), (2, 2))
        up = jax.image.resize(nn.Conv(8, (3, 3))(down), x.shape, "nearest")
        return nn.Dense(10, kernel_init=named("mlp", "classes"))(nn.with_logical_constraint(x + up, names).mean((1, 2)))


def unet(mesh, rules):
    """Its images are sharded over their height, too."""

    def loss(params, batch, key):
        return nll(UNet().apply({"params": params}, batch["x"]), batch["y"]).mean()

    height = ("tensor",) if mesh.shape["tensor"] == 2 else ()
    rules = AxisRules.model_validate(rules.model_dump() | {"embed": (), "mlp": rules["embed"] or rules["mlp"]})
    rules |= AxisRules(activation_batch=("replica", "data", "fsdp"), height=height, width=(), classes=())

    def init(key):
        return UNet().init(key, jnp.ones((1, 6, 6, 1)))["params"]

    return training(
        init, loss, optax.adamw(1e-2), images(0), mesh=mesh, rules=rules | AxisRules(**STANDARD),
        activation_dims=("activation_batch", "height", "width"), batch_dims={"x": ("batch", "height", "width", "")},
    )  # fmt: skip


# --- optimizers that evaluate the loss or the gradient at other parameters


def optimized(tx):
    def make(mesh, rules):
        graph = abstract(MLPModel)

        def loss(params, batch, key):
            return nll(nnx.merge(graph, params)(batch["x"], None), batch["y"]).mean()

        def init(key):
            return nnx.state(MLPModel(nnx.Rngs(key)), nnx.Param)

        return training(init, loss, tx, numbers(0), mesh=mesh, rules=rules | AxisRules(classes=(), **STANDARD))

    return make


adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
sam = optimized(optax.contrib.sam(optax.sgd(0.1, 0.9), adversary, opaque_mode=True))
sam_in_turns = optimized(optax.contrib.sam(optax.sgd(0.1, 0.9), adversary))
lbfgs = optimized(optax.lbfgs(memory_size=3))


MODELS = {
    "mlp": (mlp, numbers),
    "conv_net": (conv_net, images),
    "transformer": (transformer, sentences),
    "encoder_decoder": (encoder_decoder, sentences),
    "mixture": (mixture, numbers),
    "unnamed": (unnamed, sentences),
    "regularized": (regularized, numbers),
    "gemma": (gemma, sentences),
    "resnet": (resnet, images),
    "unet": (unet, images),
    "sam": (sam, numbers),
    "sam_in_turns": (sam_in_turns, numbers),
    "lbfgs": (lbfgs, numbers),
}
