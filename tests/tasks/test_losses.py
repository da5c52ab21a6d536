"""The losses that a config names, against formulas and scikit-learn; rows that do not count change nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from sklearn import metrics as sklearn

from meshpar import ConfigError, Run
from meshpar.interop.named_loss import ModelCall
from meshpar.train.tasks import Classify, Contrastive, MaskedTokens, Regress
from meshpar.train.tasks.metrics import Gathered, auc, f1, recall

ROWS = 11
FILLERS = 5
COUNTED = np.array([1] * ROWS + [0] * FILLERS, np.int32)


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=(ROWS + FILLERS, *shape)).astype(np.float32)


def means(loss, outputs, batch, more=None):
    """The means of an evaluation of a batch with fillers, and the metrics of all rows."""
    sums = loss.sums(outputs, batch | {"counted": COUNTED}, more, is_training=False)
    count = float(sums.count)
    found = {"loss": float(sums.loss) / count} | {name: float(x) / count for name, x in sums.metrics.items()}
    gathered = Gathered()
    gathered.add(loss.of_rows(outputs, batch) | {"counted": COUNTED})
    return found | loss.of_means(found) | {name: metric(gathered.all) for name, metric in loss.row_metrics.items()}


def test_weights_of_classes_are_the_weighted_losses_of_the_classes():
    """Of two mixed images, and of one: scikit-learn has the loss of a class."""
    outputs, kept = drawn(4), 0.7
    one, other = np.arange(ROWS + FILLERS) % 4, (np.arange(ROWS + FILLERS) + 1) % 4
    label = (np.eye(4)[one] * kept + np.eye(4)[other] * (1 - kept)).astype("f")
    loss = Classify(metrics=["accuracy", "f1"])
    found = means(loss, jnp.asarray(outputs), {"label": jnp.asarray(label)})
    scores = np.exp(outputs[:ROWS]) / np.exp(outputs[:ROWS]).sum(-1, keepdims=True)
    losses = [sklearn.log_loss(labels[:ROWS], scores, labels=range(4)) for labels in (one, other)]
    assert found["loss"] == pytest.approx(kept * losses[0] + (1 - kept) * losses[1], rel=1e-5)
    assert found["accuracy"] == pytest.approx(sklearn.accuracy_score(one[:ROWS], scores.argmax(-1)))
    with pytest.raises(ConfigError, match=r"or a probability for each of the model's 4 classes"):
        means(loss, jnp.asarray(outputs), {"label": jnp.asarray(label[:, :3])})


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("error", ["squared", "absolute"])
def test_regression_has_the_errors_of_scikit_learn(shape, error):
    label, output = drawn(*shape), drawn(*shape, seed=1)
    loss = Regress(label="y", error=error, metrics=["mse", "rmse", "mae", "r2"])
    found = means(loss, jnp.asarray(output), {"y": jnp.asarray(label)})
    real, predicted = label[:ROWS], output[:ROWS]
    expected = {
        "mse": sklearn.mean_squared_error(real, predicted),
        "rmse": sklearn.mean_squared_error(real, predicted) ** 0.5,
        "mae": sklearn.mean_absolute_error(real, predicted),
        "r2": sklearn.r2_score(real, predicted),
    }
    expected["loss"] = expected["mse" if error == "squared" else "mae"]
    assert found == pytest.approx(expected, rel=1e-6)


def test_two_classes_have_the_f1_and_the_area_of_class_1_also_with_equal_scores():
    label = np.random.default_rng(0).integers(2, size=200)
    score = np.round(np.random.default_rng(1).random(200), 1)
    results = {"label": label, "predicted": (score > 0.5).astype(int), "scores": np.stack([1 - score, score], -1)}
    assert f1(results) == pytest.approx(sklearn.f1_score(label, results["predicted"]), abs=1e-12)
    assert auc(results) == pytest.approx(sklearn.roc_auc_score(label, score), abs=1e-12)


def test_masked_tokens_hide_the_fraction_of_bert_and_no_padding():
    loss = MaskedTokens(mask_id=1, pad_id=0, vocab_size=50)
    tokens = jnp.asarray(np.random.default_rng(0).integers(2, 50, size=(64, 128)).astype(np.int32).repeat(2, 0))
    tokens = tokens.at[:, 100:].set(0)
    given, is_chosen = loss.inputs({"tokens": tokens, "counted": jnp.ones(128)}, jax.random.key(3))
    assert given.keys() == {"tokens"}
    chosen, before, after = (np.asarray(x) for x in (is_chosen, tokens, given["tokens"]))
    assert not chosen[:, 100:].any()
    assert chosen[:, :100].mean() == pytest.approx(0.15, abs=0.01)
    np.testing.assert_array_equal(after[~chosen], before[~chosen])
    assert (after[chosen] == 1).mean() == pytest.approx(0.8, abs=0.03)
    assert (after[chosen] == before[chosen]).mean() == pytest.approx(0.1 + 0.1 / 50, abs=0.03)
    again = loss.inputs({"tokens": tokens}, None)[0]["tokens"], loss.inputs({"tokens": tokens}, None)[0]["tokens"]
    np.testing.assert_array_equal(*again)
    assert not np.array_equal(again[0], after)


def test_masked_tokens_are_compared_where_they_were_hidden():
    loss = MaskedTokens(mask_id=1, vocab_size=5)
    tokens = np.random.default_rng(0).integers(0, 5, size=(ROWS + FILLERS, 8)).astype(np.int32)
    logits = drawn(8, 5)
    is_chosen = np.random.default_rng(2).random((ROWS + FILLERS, 8)) < 0.4
    found = means(loss, jnp.asarray(logits), {"tokens": jnp.asarray(tokens)}, jnp.asarray(is_chosen))
    log = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    own = np.take_along_axis(log, tokens[..., None], -1)[:ROWS, :, 0][is_chosen[:ROWS]]
    right = (logits.argmax(-1) == tokens)[:ROWS][is_chosen[:ROWS]]
    expected = {"loss": -own.mean(), "accuracy": right.mean(), "perplexity": np.exp(-own.mean())}
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("learned", [False, True])
def test_contrastive_pairs_are_those_of_clip(learned):
    a, b = drawn(6), drawn(6, seed=1)
    scale = 5.0
    outputs = (jnp.asarray(a), jnp.asarray(b), *([jnp.float32(scale)] if learned else []))
    loss = Contrastive(temperature=1 / scale if not learned else None, metrics=["recall_at_1", "recall_at_3"])
    found = means(loss, outputs, {})
    a, b = (x[:ROWS] / np.linalg.norm(x[:ROWS], axis=-1, keepdims=True) for x in (a, b))
    products = scale * a @ b.T
    log = [x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (products, products.T)]
    rank = np.array([sorted(-row).index(-row[i]) for i, row in enumerate(products)])
    expected = {"loss": -sum(np.diag(x).mean() for x in log) / 2}
    expected |= {"recall_at_1": (rank < 1).mean(), "recall_at_3": (rank < 3).mean()}
    assert found == pytest.approx(expected, rel=1e-5)


def test_embeddings_that_are_all_equal_recall_nothing():
    assert recall({"a": np.ones((4, 2)), "b": np.ones((4, 2))}, within=1) == 0


def run(loss, **more):
    keys = {
        "model": {"kind": "import", "target": "mine:Model"}, "data": {"kind": "import", "target": "mine:rows"},
        "optim": {"kind": "adamw", "lr": 1e-3}, "num_steps": 1, "run_dir": "run",
    }  # fmt: skip
    return Run.model_validate(keys | {"loss": loss} | more)


def test_a_word_is_a_loss_a_target_is_ones_own_and_a_mapping_without_a_kind_is_the_next_tokens():
    assert run("classify").loss == Classify()
    assert run("mine:loss").loss.target == "mine:loss"
    assert run({"z_loss": 1e-4}).loss.kind == "next_token"
    assert run({"kind": "regress", "label": "price"}).loss == Regress(label="price")


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("clasify", "classify"),
        ({"kind": "classify", "metrics": ["acuracy"]}, "'acuracy' is no metric of classes; did you mean accuracy?"),
        ({"kind": "contrastive", "metrics": ["accuracy"]}, "there is recall_at_1, or another number"),
        ({"kind": "masked_tokens"}, "loss.mask_id"),
    ],
)
def test_wrong_losses_are_refused(loss, message):
    with pytest.raises(ConfigError) as error:
        run(loss)
    assert message in str(error.value)


def test_outputs_that_do_not_fit_are_named():
    with pytest.raises(ConfigError, match=r"the model returns \{'the output': \[16, 3, 2\]\}, and the loss needs"):
        means(Classify(), jnp.zeros((16, 3, 2)), {"label": jnp.zeros(16, jnp.int32)})
    with pytest.raises(ConfigError, match=r"loss.label = label: the rows have no such array; they have y"):
        means(Classify(), jnp.zeros((16, 3)), {"y": jnp.zeros(16, jnp.int32)})
    with pytest.raises(ConfigError, match=r"the model returns \[\[16, 2\]\], and the labels are \[16\]"):
        means(Regress(), jnp.zeros((16, 2)), {"label": jnp.zeros(16)})
    scaled = (jnp.ones((16, 2)), jnp.ones((16, 2)), jnp.float32(1))
    with pytest.raises(ConfigError, match=r"loss.temperature = 0.5: the model returns a scale"):
        means(Contrastive(temperature=0.5), scaled, {})
    with pytest.raises(ConfigError, match=r"the loss needs \(a, b\) or \(a, b, scale\)"):
        means(Contrastive(), jnp.zeros((16, 2)), {})


class Keyed(nnx.Module):
    """Its call needs random keys, as models of jax-ml/bonsai do."""

    def __init__(self, *, rngs):
        self.dropout, self.linear = nnx.Dropout(0.5), nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x, *, rngs):
        return self.linear(self.dropout(x, rngs=rngs))


def test_a_call_that_needs_keys_gets_those_of_a_step_and_none_in_an_evaluation():
    call, model, x = ModelCall.of(Keyed, "own:Keyed", {}), Keyed(rngs=nnx.Rngs(0)), jnp.ones((2, 4))
    assert call.parameters == ("x",)
    one, other, again = (call.outputs(model, {"x": x}, (), jax.random.key(i)) for i in (1, 2, 1))
    assert (one == again).all() and (one != other).any()
    model.eval()
    assert (call.outputs(model, {"x": x}, ()) == model.linear(x)).all()
