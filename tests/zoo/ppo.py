"""The actor-critic of Flax's PPO example: frames, a clipped loss, advantages normalized over the batch."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tests.zoo import Zoo
from tests.zoo.parts import ROWS, WHOLE, wide

ACTIONS = 8


class ActorCritic(nn.Module):
    """A smaller version of the convolutional network of Mnih et al. 2015."""

    num_outputs: int = ACTIONS

    @nn.compact
    def __call__(self, x):
        x = x.astype(jnp.result_type(float)) / 255.0
        x = nn.Conv(features=16, kernel_size=(4, 4), strides=(2, 2), name="conv1")(x)
        x = nn.relu(x)
        x = nn.Conv(features=16, kernel_size=(3, 3), strides=(2, 2), name="conv2")(x)
        x = nn.relu(x)
        x = nn.Conv(features=8, kernel_size=(3, 3), strides=(1, 1), name="conv3")(x)
        x = nn.relu(x)
        x = x.reshape((x.shape[0], -1))
        x = nn.Dense(features=32, name="hidden")(x)
        x = nn.relu(x)
        logits = nn.Dense(features=self.num_outputs, name="logits")(x)
        policy_log_probabilities = nn.log_softmax(logits)
        value = nn.Dense(features=1, name="value")(x)
        return policy_log_probabilities, value


def build() -> Zoo:
    rng = np.random.default_rng(0)
    batch = {
        "states": rng.integers(0, 256, (ROWS, 16, 16, 4)).astype(np.uint8),
        "actions": rng.integers(0, ACTIONS, ROWS, np.int32),
        "old_log_probs": np.log(rng.uniform(0.08, 0.2, ROWS)),
        "returns": rng.normal(size=ROWS),
        "advantages": rng.normal(size=ROWS),
    }

    def init(key):
        return ActorCritic().init(key, jnp.ones((1, 16, 16, 4)))["params"]

    def loss(params, batch, key, clip_param=0.2, vf_coeff=0.5, entropy_coeff=0.01):
        log_probs, values = ActorCritic().apply({"params": params}, batch["states"])
        values = values[:, 0]  # Convert shapes: (batch, 1) to (batch, ).
        probs = jnp.exp(log_probs)
        value_loss = jnp.mean(jnp.square(batch["returns"] - values), axis=0)
        entropy = jnp.sum(-probs * log_probs, axis=1).mean()
        log_probs_act_taken = jax.vmap(lambda lp, a: lp[a])(log_probs, batch["actions"])
        ratios = jnp.exp(log_probs_act_taken - batch["old_log_probs"])
        advantages = batch["advantages"]
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        pg_loss = ratios * advantages
        clipped_loss = advantages * jax.lax.clamp(1.0 - clip_param, ratios, 1.0 + clip_param)
        ppo_loss = -jnp.mean(jnp.minimum(pg_loss, clipped_loss), axis=0)
        total = ppo_loss + vf_coeff * value_loss - entropy_coeff * entropy
        return total, {"entropy": entropy, "value_loss": value_loss}

    dims = {
        "conv1.kernel": ("height", "width", "channels", "mlp"),
        "conv2.kernel": ("height", "width", "mlp", "embed"),
        "conv3.kernel": ("height", "width", "embed", "mlp"),
        "hidden.kernel": ("embed", "mlp"),
        "logits.kernel": ("mlp", "classes"),
        "value.kernel": ("mlp", "unnamed"),
    }
    return Zoo("ppo", wide(init), loss, batch, dims=dims, rules=WHOLE | {"unnamed": ()})
