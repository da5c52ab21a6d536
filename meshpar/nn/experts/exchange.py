"""The exchange of rows between devices that hold different experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from meshpar.mesh.varying import Axes, varying_alike, varying_like
from meshpar.parallel.context import manual, platform
from meshpar.parallel.strategies import ExpertParallel

Apply = Callable[[jax.Array, jax.Array], jax.Array]
"""(rows, the expert of each, counted from this device's first) -> their results."""


NATIVE = ("gpu", "tpu")
"""The platforms, by JAX's names, whose compiler supports a ragged all-to-all."""


def selected() -> ExpertParallel:
    """The exchange that the run configures; by default `ragged` where the compiler supports it, else `gather`."""
    ctx = manual()
    chosen = ctx.parallel.expert if ctx else None
    if chosen and chosen.kind != "auto":
        return chosen
    return ExpertParallel(kind="ragged" if platform() in NATIVE else "gather")


class Devices(NamedTuple):
    """Devices along axes that exchange rows: all of them, or groups of `size` devices at a distance of `stride`."""

    axes: Axes
    size: int
    stride: int = 1

    @classmethod
    def along(cls, axes: Axes) -> Devices:
        return cls(axes, lax.axis_size(axes))

    def divided(self, group: int) -> tuple[Devices, Devices]:
        """Groups of `group` neighbours, and groups of the devices that have the same place in these."""
        return Devices(self.axes, group), Devices(self.axes, self.size // group, group)

    @property
    def index(self) -> jax.Array:
        """The place of this device in its group."""
        return lax.axis_index(self.axes) // self.stride % self.size

    @property
    def groups(self) -> list[list[int]] | None:
        num = lax.axis_size(self.axes)
        if num == self.size:
            return None
        places = np.arange(num).reshape(-1, self.size, self.stride).swapaxes(1, 2)
        return places.reshape(-1, self.size).tolist()

    def gather(self, x: jax.Array) -> jax.Array:
        """[size, *shape], x of all devices of the group."""
        return lax.all_gather(x, self.axes, axis_index_groups=self.groups)


class Exchange(NamedTuple):
    """An exchange between n devices; each holds `per_device` consecutive experts.

    Memory: a device has room for the rows of all tokens of all devices, min(K, per_device) for each token, because a
      router may send them all to one device.
    """

    devices: Devices
    per_device: int

    @property
    def num_experts(self) -> int:
        """Experts on all devices."""
        return self.devices.size * self.per_device

    def apply(
        self, compute: Apply, rows_ND: Float[Array, "N D"], sizes_E: Int[Array, "E"], longest: int
    ) -> Float[Array, "N D"]:
        """Sends rows to the devices of their experts, computes there, and sends the results back to their places.

        Args:
          rows_ND: sorted by expert.
          sizes_E: int32, this device's rows for each expert on all devices.
          longest: the largest number of rows that a device can send to another one.

        Communication: (n-1)/n of the rows each way, if all devices get equally many. Compilers without a ragged
          all-to-all send n-1 times the rows there, and n-1 times the room for them back.
        """
        num = self.devices.size
        sizes_FTE = self.devices.gather(sizes_E.reshape(num, -1))  # from, to, expert of the target
        there = Plan(sizes_FTE.sum(-1, dtype=jnp.int32), self.devices)
        sizes_FE = jnp.take(sizes_FTE, self.devices.index, axis=1)
        received = send(rows_ND, there, num * longest)
        results = compute(received, _experts_of(sizes_FE, len(received)))
        return send(results, there.back, len(rows_ND))


def _experts_of(sizes_FE: Int[Array, "F E"], num_rows: int) -> Int[Array, "N"]:
    """The expert of each received row; unused rows have the number after the last. Rows come by sender and expert."""
    ends = jnp.cumsum(sizes_FE.reshape(-1), dtype=jnp.int32)
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    block = jnp.searchsorted(ends, rows, side="right").astype(jnp.int32)
    per_device = sizes_FE.shape[1]
    return jnp.where(block < sizes_FE.size, block % per_device, per_device)


class Plan(NamedTuple):
    """How many rows each device sends to each other. Rows are sorted by target when sent, by sender when received.

    Args:
      sizes: int32 [from, to].
    """

    sizes: jax.Array
    devices: Devices

    @property
    def back(self) -> Plan:
        return Plan(self.sizes.T, self.devices)


def _starts(sizes: Int[Array, "*rest N"]) -> Int[Array, "*rest N"]:
    return jnp.cumsum(sizes, axis=-1, dtype=jnp.int32) - sizes


def send(rows_ND: Shaped[Array, "N D"], plan: Plan, num_rows: int) -> Shaped[Array, "M D"]:
    """Sends rows by a plan. Returns the rows that this device receives, and zeros after the last."""
    rows_ND, sizes = varying_alike(rows_ND, plan.sizes)
    lengths = len(rows_ND), num_rows
    if jnp.issubdtype(rows_ND.dtype, jnp.integer):
        return _received(rows_ND, sizes, plan.devices, lengths)
    return _sent(rows_ND, sizes, plan.devices, lengths)


def _received(rows_ND: jax.Array, sizes_FT: jax.Array, devices: Devices, lengths: tuple[int, int]) -> jax.Array:
    """See `send`.

    Args:
      lengths: the numbers of rows of the argument and of the result.
    """
    num_rows = lengths[1]
    own = devices.index
    begins_FT = _starts(sizes_FT)
    arrives_FT = _starts(sizes_FT.T).T
    if platform() in NATIVE:
        empty = varying_like(jnp.zeros((num_rows, rows_ND.shape[1]), rows_ND.dtype), rows_ND)
        plan = begins_FT[own], sizes_FT[own], arrives_FT[own], sizes_FT[:, own]
        return lax.ragged_all_to_all(rows_ND, empty, *plan, axis_name=devices.axes, axis_index_groups=devices.groups)
    whole_FND = devices.gather(rows_ND)
    place = jnp.arange(num_rows, dtype=jnp.int32)
    ends_F = jnp.cumsum(sizes_FT[:, own], dtype=jnp.int32)
    sender = jnp.minimum(jnp.searchsorted(ends_F, place, side="right"), len(ends_F) - 1).astype(jnp.int32)
    row = jnp.clip(place - arrives_FT[sender, own] + begins_FT[sender, own], 0, len(rows_ND) - 1)
    return jnp.where((place < ends_F[-1])[:, None], whole_FND[sender, row], jnp.zeros((), rows_ND.dtype))


_sent = partial(jax.custom_vjp, nondiff_argnums=(2, 3))(_received)
"""`_received`, whose transpose sends the rows back."""


def _send_back(
    devices: Devices, lengths: tuple[int, int], sizes_FT: jax.Array, grad: jax.Array
) -> tuple[jax.Array, np.ndarray]:
    return _sent(grad, sizes_FT.T, devices, lengths[::-1]), np.zeros(sizes_FT.shape, jax.dtypes.float0)


_sent.defvjp(lambda rows, sizes, *settings: (_sent(rows, sizes, *settings), sizes), _send_back)
