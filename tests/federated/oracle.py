"""Federated learning in NumPy, client after client, with gradients by hand; written from the papers.

The model is softmax regression: parameters are a matrix [features + 1, classes], whose last row is the bias.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from meshpar.federated import FedAdam, Federated, FedProx, Scaffold


def gradient(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of the mean cross-entropy of examples x [B, features] with labels y."""
    ones = np.c_[x, np.ones(len(x))]
    logits = ones @ w
    scores = np.exp(logits - logits.max(1, keepdims=True))
    scores /= scores.sum(1, keepdims=True)
    scores[np.arange(len(y)), y] -= 1
    return ones.T @ scores / len(y)


class Reference:
    """The server and all clients.

    Args:
      w: float64 [features + 1, classes], the first parameters.
    """

    def __init__(self, config: Federated, w: np.ndarray):
        self.config = config
        self.w = w
        self.mean = np.zeros_like(w)
        self.square = np.full_like(w, config.method.tau**2) if isinstance(config.method, FedAdam) else None
        self.control = np.zeros_like(w)
        self.controls = np.zeros((config.clients.num, *w.shape))

    def client(self, client: int, steps: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
        """The update of a client, and its next control variate."""
        w = self.w.copy()
        method = self.config.method
        lr = self.config.local.lr
        for x, y in steps:
            g = gradient(w, x, y)
            if isinstance(method, FedProx):
                g = g + method.mu * (w - self.w)
            if isinstance(method, Scaffold):
                g = g - self.controls[client] + self.control
            w = w - lr * g
        control = self.controls[client]
        if steps:
            control = control - self.control + (self.w - w) / (len(steps) * lr)
        return w - self.w, control

    def play(self, clients: dict[int, tuple[int, list[Any], bool]], noise: np.ndarray | float = 0.0) -> None:
        """A round.

        Args:
          clients: number -> number of examples, batches, and whether it sends its update.
          noise: is added to the mean.
        """
        config = self.config
        updates = {client: self.client(client, steps) for client, (_, steps, _) in clients.items()}
        sent = [client for client, (_, _, is_sent) in clients.items() if is_sent]
        sizes = {client: clients[client][0] if config.weighting == "examples" else 1 for client in sent}
        total = len(clients) if config.privacy else sum(sizes.values())
        mean = np.zeros_like(self.w) + noise
        for client in sent:
            update = updates[client][0]
            if config.privacy:
                update = update * min(1, config.privacy.clip_norm / np.linalg.norm(update))
            mean = mean + sizes[client] / total * update
        self.server_step(mean)
        changes = sum((updates[client][1] - self.controls[client] for client in sent), np.zeros_like(self.w))
        self.control = self.control + changes / config.clients.num
        for client in sent:
            self.controls[client] = updates[client][1]

    def server_step(self, mean: np.ndarray) -> None:
        method = self.config.method
        if not isinstance(method, FedAdam):
            self.w = self.w + method.server_lr * mean
            return
        assert self.square is not None
        self.mean = method.b1 * self.mean + (1 - method.b1) * mean
        self.square = method.b2 * self.square + (1 - method.b2) * mean**2
        self.w = self.w + method.server_lr * self.mean / (np.sqrt(self.square) + method.tau)


def matrix(params: Any) -> np.ndarray:
    """Flax's parameters as the matrix of the reference."""
    layer = jax.device_get(params)["Dense_0"]
    return np.concatenate([layer["kernel"], layer["bias"][None]])
