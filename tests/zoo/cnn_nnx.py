"""The CNN of Flax's MNIST example in NNX: batch norm, dropout and average pools; statistics and keys are carried."""

from __future__ import annotations

from functools import partial

from flax import nnx

from tests.zoo import Zoo
from tests.zoo.parts import accuracy, cross_entropy, images, wide

CLASSES = 8


class CNN(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 16, kernel_size=(3, 3), rngs=rngs)
        self.batch_norm1 = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.dropout1 = nnx.Dropout(rate=0.025, rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, kernel_size=(3, 3), rngs=rngs)
        self.batch_norm2 = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.avg_pool = partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
        self.linear1 = nnx.Linear(4 * 32, 32, rngs=rngs)
        self.dropout2 = nnx.Dropout(rate=0.25, rngs=rngs)
        self.linear2 = nnx.Linear(32, CLASSES, rngs=rngs)

    def __call__(self, x):
        x = self.avg_pool(nnx.relu(self.batch_norm1(self.dropout1(self.conv1(x)))))
        x = self.avg_pool(nnx.relu(self.batch_norm2(self.conv2(x))))
        x = x.reshape(x.shape[0], -1)
        x = nnx.relu(self.dropout2(self.linear1(x)))
        return self.linear2(x)


def build() -> Zoo:
    graph = nnx.graphdef(nnx.eval_shape(lambda: CNN(rngs=nnx.Rngs(0))))

    def state(key, *filters):
        return nnx.state(CNN(rngs=nnx.Rngs(key)), *filters)

    def loss(params, batch, key, carried):
        model = nnx.merge(graph, params, carried)
        logits = model(batch["image"])
        metrics = {"accuracy": accuracy(logits, batch["label"])}
        return cross_entropy(logits, batch["label"]), metrics, nnx.state(model, nnx.Not(nnx.Param))

    dims = {
        "conv1.kernel": ("height", "width", "channels", "mlp"),
        "conv2.kernel": ("height", "width", "embed", "mlp"),
        "conv*.bias": ("mlp",),
        "linear1.kernel": ("embed", "mlp"),
        "linear1.bias": ("mlp",),
        "linear2.kernel": ("mlp", "classes"),
        "linear2.bias": ("classes",),
    }
    rules = {"height": (), "width": (), "channels": (), "classes": (), "unnamed": ()}
    return Zoo(
        "cnn_nnx", wide(lambda key: state(key, nnx.Param)), loss, images(8, 1, CLASSES),
        carried=wide(lambda key: state(key, nnx.Not(nnx.Param))), dims=dims, rules=rules,
    )  # fmt: skip
