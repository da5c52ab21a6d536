"""Each kind of fault that composed parallelism is prone to is planted, found, and blamed on the right axis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from meshpar import AxisRules, LossSums, MeshLayout, Verification, training, verify
from meshpar.checkpoint.checkpoints import Checkpoints
from meshpar.mesh.varying import varying
from meshpar.parallel import data, tensor
from meshpar.parallel.context import ParallelContext, manual, manual_axes
from meshpar.train import gradients, token_loss
from meshpar.train.step import Update
from tests.verification import toy as toys
from tests.verification.toy import BATCHES, toy

CUBE = {"data": 2, "fsdp": 2, "tensor": 2}
FSDP = ("fsdp", "megatron")


def proof_of(training_) -> Verification:
    return verify(training_, BATCHES)


def guilty(proof: Verification) -> dict[str, str]:
    """Layout -> what differs there first."""
    return {row.name: str(row.difference or row.error) for row in proof.culprits}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("sizes", "presets", "more"),
    [
        (CUBE, FSDP, {"draws": True, "num_microbatches": 2}),
        (CUBE, ("zero1", "megatron_sp"), {}),
        pytest.param({"data": 2, "tensor": 4}, ("megatron_sp",), {"draws": True}, marks=pytest.mark.slow),
    ],
)
def test_a_training_without_faults_is_equal(sizes, presets, more):
    proof = proof_of(toy(sizes, *presets, **more))
    assert proof.is_equal, str(proof)
    assert len(proof.rows) == 1 + len(sizes) + 3


# In the sums over devices ------------------------------------------------------------------------------------------


def test_a_missing_reduction_is_blamed_on_its_axis(monkeypatch):
    """The first device's gradient stands for the sum over all devices."""

    def only_the_first(grad, axes):
        if "data" not in axes:
            return summed(grad, axes)
        return summed(jnp.where(lax.axis_index("data") == 0, grad, jnp.zeros_like(grad)), axes)

    summed = data.sum_gradient
    monkeypatch.setattr(data, "sum_gradient", only_the_first)
    proof = proof_of(toy(CUBE, *FSDP))
    assert list(guilty(proof)) == ["data=2"]
    assert guilty(proof)["data=2"].startswith("step 1, gradient of down: differs by up to")


def test_a_doubled_reduction_is_blamed_on_its_axis(monkeypatch):
    def twice(grad, axes):
        once = summed(grad, axes)
        return lax.psum(varying(once, ("data",)), "data") if "data" in axes else once

    summed = data.sum_gradient
    monkeypatch.setattr(data, "sum_gradient", twice)
    proof = proof_of(toy(CUBE, *FSDP))
    assert guilty(proof) == {"data=2": "step 1, gradient of down: exactly 2x (and 3 more of 4 gradients)"}


def test_a_mean_of_means_is_blamed_on_both_batch_axes(monkeypatch):
    """Each device divides by its own number of tokens, which differs by device: wrong over both batch axes."""

    def by_device(*args):
        got, grads = accumulate(*args)

        def mean(x):
            return x / got.count.astype(x.dtype)

        return replace(got, loss=mean(got.loss), count=got.count // got.count), jax.tree.map(mean, grads)

    accumulate = gradients._accumulate
    monkeypatch.setattr(gradients, "_accumulate", by_device)
    proof = proof_of(toy(CUBE, *FSDP))
    assert list(guilty(proof)) == ["data=2", "fsdp=2"]
    assert all(text.startswith("step 1, the loss: ") for text in guilty(proof).values())


def test_a_mean_over_a_local_sequence_is_blamed_on_tensor(monkeypatch):
    """The mean over the sequence is computed over the local shard."""
    monkeypatch.setattr(toys, "centred", lambda x: x - x.mean(1, keepdims=True))
    proof = proof_of(toy({"data": 2, "tensor": 2}, "megatron_sp"))
    assert list(guilty(proof)) == ["tensor=2"]


def test_clipping_by_a_local_norm_is_blamed_on_fsdp(monkeypatch):
    """The norm is that of local shards: the gradients are right, the norm is not."""

    def local_norm(grads, placements):
        squares = sum(data._square(grad) for grad in jax.tree.leaves(grads))
        axes = tuple(a for a in ("fsdp",) if manual() and a in manual().gradient_axes)
        return lax.pmean(jnp.sqrt(squares), axes) if axes else norm(grads, placements)

    norm = data.global_norm
    monkeypatch.setattr(data, "global_norm", local_norm)
    clipped = toy({"data": 2, "fsdp": 2}, "fsdp")
    proof = proof_of(replace(clipped, update=replace(clipped.update, clip_norm=1e-3)))
    assert list(guilty(proof)) == ["fsdp=2"]
    assert guilty(proof)["fsdp=2"].startswith("step 1, the norm of the gradient: ")


# In rules and shards -----------------------------------------------------------------------------------------------


def test_a_wrong_rule_is_blamed_on_its_axis(monkeypatch):
    """The parameters are sharded over vocab, and the model computes as if they were whole."""
    axes = ParallelContext.axes
    monkeypatch.setattr(ParallelContext, "axes", lambda ctx, dim: () if dim == "vocab" else axes(ctx, dim))
    proof = proof_of(toy(CUBE, *FSDP))
    assert list(guilty(proof)) == ["tensor=2"]
    assert "Error: " in guilty(proof)["tensor=2"]


def test_padding_that_gets_probability_is_blamed_on_tensor(monkeypatch):
    """With a sharded vocabulary, the rows that pad it are not masked."""

    def without_mask(logits, targets, vocab_size):
        return cross_entropy(logits, targets, toys.PADDED if manual_axes("vocab") else vocab_size)

    cross_entropy = token_loss.cross_entropy
    monkeypatch.setattr(token_loss, "cross_entropy", without_mask)
    proof = proof_of(toy(CUBE, *FSDP))
    assert list(guilty(proof)) == ["tensor=2"]
    assert guilty(proof)["tensor=2"].startswith("step 1, the loss: ")


def next_of(tokens, border: Callable):
    """The token after each; the last of a shard comes from its neighbour."""
    return jnp.concatenate([tokens[:, 1:], border(tokens[:, :1])], axis=1)


def from_the_neighbour(first):
    axes = manual_axes("residual_seq")
    if not axes:
        return first
    size = lax.axis_size(axes)
    return lax.ppermute(first, axes, [(i, (i - 1) % size) for i in range(size)])


@pytest.mark.parametrize("border", [from_the_neighbour, lambda first: first], ids=["right", "wrong"])
def test_labels_shifted_within_a_shard_are_blamed_on_context(border):
    """The sequence is sharded over context; the label of a shard's last token is the next shard's first token."""

    def bigrams(params, batch, key):
        axes = manual_axes("residual_seq")
        logits = params["table"][batch["tokens"]] @ params["head"]
        nll = token_loss.cross_entropy(logits, next_of(batch["tokens"], border), toys.PADDED)
        sums = nll.sum(), jnp.ones_like(batch["tokens"]).sum(dtype=jnp.int32)
        return LossSums(*(lax.psum(sums, axes) if axes else sums))

    bigram = training(
        lambda key: {name: toys.init(key)[name] for name in ("table", "head")},
        bigrams,
        optax.sgd(0.1),
        BATCHES[0],
        mesh=MeshLayout(data=2, context=2).build(jax.devices()[:4]),
        rules=AxisRules(preset="replicated", residual_seq=("context",)),
        dims={name: toys.DIMS[name] for name in ("table", "head")},
        batch_dims={"tokens": ("batch", "residual_seq")},
        manual=True,
    )
    proof = verify(bigram, BATCHES)
    assert list(guilty(proof)) == ([] if border is from_the_neighbour else ["context=2"])
    if not proof.is_equal:
        assert guilty(proof)["context=2"].startswith("step 1, the loss: ")


# In the backward ---------------------------------------------------------------------------------------------------


def test_a_wrong_transpose_is_blamed_on_fsdp(monkeypatch):
    """The backward of the gather scatters the shards in another order."""

    def backward(*arguments):
        _, shard = right(*arguments)
        return None, lax.ppermute(shard, "fsdp", [(0, 1), (1, 0)])

    right = data._all_gather_backward
    crossed = jax.custom_vjp(data._all_gather.__wrapped__, nondiff_argnums=(2, 3, 4, 5))
    crossed.defvjp(lambda *arguments: (crossed(*arguments), None), backward)
    monkeypatch.setattr(data, "_all_gather", crossed)
    proof = proof_of(toy(CUBE, *FSDP))
    message = "step 1, gradient of down: the same numbers in other places (and 3 more of 4 gradients)"
    assert guilty(proof) == {"fsdp=2": message}


def test_a_region_entered_without_its_backward_sum_is_blamed_on_tensor(monkeypatch):
    monkeypatch.setattr(tensor, "varying", lambda x, axes: lax.stop_gradient(x) + lax.pcast(0 * x, axes, to="varying"))
    proof = proof_of(toy({"data": 2, "tensor": 2}, "megatron"))
    assert list(guilty(proof)) == ["tensor=2"]
    assert "gradient of" in guilty(proof)["tensor=2"]


# In random draws ---------------------------------------------------------------------------------------------------


def test_a_key_that_is_not_folded_is_blamed_on_data(monkeypatch):
    """Dropout masks depend on a row's local index, so that all devices draw the same."""
    monkeypatch.setattr(toys, "rows", lambda batch: jnp.arange(batch["row"].shape[0], dtype=jnp.int32))
    proof = proof_of(toy({"data": 2, "tensor": 2}, "megatron", draws=True))
    assert list(guilty(proof)) == ["data=2"]
    assert proof.draws_differ
    assert str(proof).endswith("it is equal without dropout: only the random numbers differ")


# In state ----------------------------------------------------------------------------------------------------------


def test_a_stale_buffer_is_blamed_on_fsdp(monkeypatch):
    """A parameter that is sharded over fsdp misses its update."""

    def stale(self, state, got, sharded, *more):
        new, metrics = update(self, state, got, sharded, *more)
        if sharded["table"].mesh.shape["fsdp"] > 1:
            new = replace(new, params=new.params | {"table": state.params["table"]})
        return new, metrics

    update = Update.__call__
    monkeypatch.setattr(Update, "__call__", stale)
    proof = proof_of(toy(CUBE, *FSDP))
    assert list(guilty(proof)) == ["fsdp=2"]
    assert guilty(proof)["fsdp=2"].startswith("step 1, parameter of table: ")


def test_optimizer_state_lost_in_a_checkpoint_is_found_after_resuming(monkeypatch):
    def forgetful(self, abstract):
        state = restore(self, abstract)
        return replace(state, opt_state=jax.tree.map(jnp.zeros_like, state.opt_state))

    restore = Checkpoints.restore
    monkeypatch.setattr(Checkpoints, "restore", forgetful)
    proof = proof_of(toy({"data": 2}, "replicated"))
    assert list(guilty(proof)) == ["resumed after step 2", "resumed after step 2, on one device"]
    assert all(text.startswith("step 3, parameter of ") for text in guilty(proof).values())


# Where no axis is guilty alone -------------------------------------------------------------------------------------


def test_wrong_accumulation_is_found_on_one_device(monkeypatch):
    def divided(objective, ctx, *args):
        got, grads = accumulate(objective, ctx, *args)
        return got, jax.tree.map(lambda g: g / ctx.num_microbatches, grads)

    accumulate = gradients._accumulate
    monkeypatch.setattr(gradients, "_accumulate", divided)
    proof = proof_of(toy({"data": 2}, "replicated", num_microbatches=4))
    assert list(guilty(proof)) == ["one device, manual, 4 microbatches"]
    assert "on one device already\n    step 1, gradient of down: exactly 1/4x" in str(proof)


def test_two_axes_that_are_wrong_only_together_are_blamed_together(monkeypatch):
    def confused(grad, axes):
        both = {"data", "tensor"} <= {axis for axis, size in manual().mesh.shape.items() if size > 1}
        return summed(grad, axes) * (3 if both else 1)

    summed = data.sum_gradient
    monkeypatch.setattr(data, "sum_gradient", confused)
    proof = proof_of(toy(CUBE, *FSDP))
    assert guilty(proof) == {"data=2, tensor=2": "step 1, gradient of down: exactly 3x (and 3 more of 4 gradients)"}
    assert "culprit: data=2, tensor=2, together" in str(proof)


def test_numbers_that_are_not_finite_are_found(monkeypatch):
    exit_region = tensor.exit_region

    def spoil(x, dim):
        return exit_region(x, dim) * (jnp.nan if manual_axes(dim) else 1.0)

    monkeypatch.setattr(tensor, "exit_region", spoil)
    proof = proof_of(toy({"data": 2, "tensor": 2}, "megatron"))
    assert guilty(proof) == {"tensor=2": "step 1, the loss: is not finite"}


def test_control_the_compared_numbers_differ_by_rounding():
    """A toy without gradients would be equal to one device, too."""
    proof = proof_of(toy({"data": 2}, "replicated"))
    assert proof.rows[0].compared is not None
    assert 0 < max(proof.rows[0].compared.largest.values()) < 1e-13
    assert np.isfinite(list(proof.rows[0].compared.largest.values())).all()
