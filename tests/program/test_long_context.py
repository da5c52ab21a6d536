"""Memory and operations of steps with long rows, on one device and sharded over axis context."""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar import training
from meshpar.cost.flops import needed_flops, traced_products
from meshpar.data import Synthetic
from meshpar.experiment.config import Run
from meshpar.experiment.prepare import prepare
from meshpar.inspection.inspect import inspect
from meshpar.mesh.layout import MeshLayout
from meshpar.models import Llama
from meshpar.nn.attention import Blocks, online_softmax
from meshpar.nn.attention.context_parallel import over_axes
from meshpar.nn.recognized import rewrite
from meshpar.optim import AdamW
from meshpar.parallel.context import ParallelContext
from meshpar.sharding.rules import AxisRules
from meshpar.train.program import on_shards
from tests.zoo import llama
from tests.zoo.parts import VOCAB

MODEL = Llama(
    num_layers=2,
    hidden_size=16,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=32,
    vocab_size=32,
    unroll=1,
    remat="full",
)


def temporaries(seq_len, context=1, model=MODEL):
    """Bytes of the temporaries of a whole step."""
    mesh = MeshLayout(context=context)
    run = Run(
        model=model,
        data=Synthetic(batch_size=1, seq_len=seq_len, vocab_size=model.vocab_size),
        optim=AdamW(lr=1e-3),
        mesh=mesh,
        rules=AxisRules(preset=("context",)),
        num_steps=1,
        run_dir="unused",
    )
    step = prepare(run, mesh.build(jax.devices()[:context])).compile_step()
    return step.compiled.memory_analysis().temp_size_in_bytes


def test_the_memory_of_a_step_is_linear_in_the_length_of_a_row():
    sizes = [temporaries(seq_len) for seq_len in (4096, 8192, 16384)]
    assert sizes[1] < 2.05 * sizes[0]
    assert sizes[2] < 2.05 * sizes[1]


def test_planted_masks_that_leave_the_loop_over_layers_are_seen(monkeypatch):
    """If the tables do not depend on the queries, JAX stores the masks of all pairs of blocks."""
    monkeypatch.setattr(online_softmax, "not_before", lambda pairs, q: pairs)
    assert temporaries(8192) > 2.5 * temporaries(4096)


@pytest.mark.slow
def test_the_memory_of_a_device_is_constant_if_context_grows_with_the_row():
    sizes = [temporaries(4096 * context, context) for context in (2, 4, 8)]
    assert max(sizes) < 1.05 * min(sizes)


HEADS = 2
SIZE = 8


@pytest.mark.parametrize("context", [2, 4, 8])
def test_zigzag_executes_at_most_2_percent_more_flops_than_needed(context):
    """The compiled forward and backward of attention are counted, with blocks of a sixteenth of a shard."""
    block = 16
    seq_len = context * 16 * block
    mesh = MeshLayout(context=context).build(jax.devices()[:context])
    ctx = ParallelContext(mesh=mesh, rules=AxisRules(preset=("context",)), manual=True)
    tokens = ctx.pspec("batch", "seq")
    core = Blocks(block_size=block)
    local = on_shards(
        lambda q, k, v, s: over_axes(core, q, k, v, s, None, ctx.axes("seq"), ctx.sequence),
        ctx, (tokens,) * 4, tokens,
    )  # fmt: skip
    qkv = [jax.ShapeDtypeStruct((1, seq_len, HEADS, SIZE), "float32")] * 3
    segments = jax.ShapeDtypeStruct((1, seq_len), "int32")
    gradients = jax.jit(jax.grad(lambda *args: jnp.sin(local(*args)).sum(), (0, 1, 2)))
    executed = inspect(gradients.lower(*qkv, segments).compile(), mesh).flops * context
    ideal = 7 * 2 * HEADS * SIZE * Fraction(seq_len**2, 2)  # two products forward, five backward
    assert 1 < executed / ideal <= 1.02
    assert needed_flops(traced_products(jax.make_jaxpr(gradients)(*qkv, segments))) == ideal


def of_a_plain_llama(seq_len):
    """Bytes of the temporaries of a whole step of a Flax model that writes its attention as a softmax of all pairs."""
    zoo = llama.build()
    tokens = np.zeros((1, seq_len), np.int32)
    with jax.numpy_dtype_promotion("standard"):
        made = training(
            lambda key: llama.Llama().init(key, tokens[:, :8])["params"], zoo.loss, AdamW(lr=1e-3),
            dict.fromkeys(zoo.batch, tokens), mesh=MeshLayout().build(jax.devices()[:1]),
            rules=AxisRules(preset=["replicated"], **zoo.rules), num_steps=1,
        )  # fmt: skip
        step = made.compile_step()
    return step.compiled.memory_analysis().temp_size_in_bytes


def test_recognized_attention_needs_the_memory_of_meshpars_own():
    model = Llama(
        num_layers=llama.LAYERS, hidden_size=llama.WIDTH, num_heads=llama.HEADS, num_kv_heads=llama.KV_HEADS,
        intermediate_size=llama.HIDDEN, vocab_size=VOCAB,
    )  # fmt: skip
    assert of_a_plain_llama(2048) <= 1.10 * temporaries(2048, model=model)


@pytest.mark.slow
def test_planted_attention_that_is_not_recognized_is_seen(monkeypatch):
    monkeypatch.setattr(rewrite, "rewritten", lambda closed: (closed, []))
    assert of_a_plain_llama(2048) > 4 * llama.HEADS * 2048**2
