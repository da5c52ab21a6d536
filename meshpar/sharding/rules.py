"""Rules: the mesh axes over which each dim is sharded.

One table serves parameters and activations. Three laws determine how an axis is used for a dim:

- **storage**: an axis that carries tokens (rows of the batch, or parts of the sequence) shards no other dim of an
  *activation*. A parameter that is sharded over this axis is stored in shards, and gathered before use. This is ZeRO;
  `zero` sets when the parameter is gathered.
- **dispatch**: `experts` that are sharded over an axis that carries tokens are not gathered: devices exchange tokens
  instead.
- **partition**: every other axis shards parameters and activations alike. This is tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import pydantic

from meshpar.config import Coerced, Config
from meshpar.errors import Problems, ShardingError, nearest
from meshpar.synonyms import new_name

DIMS = (
    "batch", "seq", "residual_seq", "positions", "embed", "heads", "kv_heads", "head_dim", "mlp", "vocab", "experts",
    "router", "rank", "layers", "stage", "key_data", "largest",
)  # fmt: skip
ACTIVATION_DIMS = ("batch", "seq", "residual_seq", "stage")
TOKENS = ("batch", "seq")
"""Dims of activations over whose axes devices hold different tokens."""
DISPATCHED = ("experts",)
"""Dims whose shards are not gathered: devices send tokens to them."""

UNNAMED = "unnamed"
"""The name of dims that neither a model nor its user names."""
LARGEST = "largest"
"""With a rule `largest=[axes]`: the largest dim, of those that the axes divide, of each parameter without names."""

Use = Literal["partition", "storage", "dispatch"]

_BATCH = {"batch": ("replica", "data", "fsdp")}
_SHARDED = _BATCH | {"embed": ("fsdp",)}
_MEGATRON = _BATCH | dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), ("tensor",))

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Every parameter is replicated; gradients are all-reduced.
    "replicated": _BATCH | {UNNAMED: ()},
    # Rajbhandari et al. 2020, "ZeRO". Over fsdp it shards, cumulatively: 1 the optimizer state; 2 the gradients and
    # the stored parameters; 3 the parameters during the step.
    "zero1": _SHARDED | {"zero": 1},
    "zero2": _SHARDED | {"zero": 2},
    "fsdp": _SHARDED | {"zero": 3},
    # The same rules as fsdp. A mesh with replica > 1 or data > 1 makes them hybrid: parameters are sharded over fsdp,
    # and replicated over the other axes.
    "hsdp": _SHARDED | {"zero": 3},
    # Shoeybi et al. 2019, "Megatron-LM"; and Korthikanti et al. 2022: norms and residuals sharded over seq.
    "megatron": _MEGATRON,
    "megatron_sp": _MEGATRON | {"residual_seq": ("tensor",)},
    # Liu et al. 2023, "Ring attention": a device holds a part of each row. `parallel.context` selects the algorithm of
    # attention.
    "context": _BATCH | {"seq": ("context",)},
    # Lepikhin et al. 2020, "GShard": each device holds some of the experts, and other rows of the batch than its peers.
    "experts": {"batch": (*_BATCH["batch"], "expert"), "experts": ("expert",)},
    # A stage of the pipeline holds its own layers.
    "pipeline": _BATCH | {"layers": ("pipe",), "stage": ("pipe",)},
}


class AxisRules(Config):
    """Presets, and rules `dim=[axes]` that override them. In a config: `rules: [fsdp, megatron]`.

    `seq` is the sequence in attention, `residual_seq` the sequence in norms, residuals and dropout. Megatron's
    sequence parallelism is a rule for `residual_seq`. `largest` is the largest dim of a parameter without names, in a
    model of your own. With a preset, standard `DIMS` without a rule are not sharded; without a preset, every dim of
    every parameter needs a rule.

    Raises:
      ShardingError: two presets, or two rules joined by `|`, disagree on a dim.

    >>> rules = AxisRules(preset="fsdp") | AxisRules(preset="megatron", kv_heads=())
    >>> rules["embed"], rules["heads"], rules["kv_heads"], rules.zero_stage
    (('fsdp',), ('tensor',), (), 3)
    """

    model_config = pydantic.ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, tuple[str, ...]] = pydantic.Field(init=False)

    shorthand: ClassVar = "preset"
    preset: tuple[str, ...] = ()
    """Names of presets, joined in order."""
    zero: Literal[1, 2, 3] | None = None
    """When a parameter that is sharded over a batch axis is gathered: 1 after the update, so that only optimizer state
    is sharded; 2 once a step; 3 in each layer, and again in the backward. Default: the preset's, or 3."""

    if TYPE_CHECKING:  # type checkers do not know that the other keys are rules

        def __init__(
            self,
            /,
            *,
            preset: str | Sequence[str] = (),
            zero: Literal[1, 2, 3] | None = None,
            **rules: Sequence[str],
        ) -> None: ...

    @pydantic.field_validator("preset")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [name for name in names if name not in PRESETS]
        if unknown:
            near = nearest(unknown[0], PRESETS)
            did = f"did you mean {near}? " if near else ""
            raise ValueError(f"no preset is called {unknown[0]!r}; {did}There are {', '.join(PRESETS)}")
        return names

    @pydantic.model_validator(mode="after")
    def _presets_agree(self) -> AxisRules:
        _join(self.preset)
        return self

    @pydantic.model_validator(mode="after")
    def _has_no_old_names(self) -> AxisRules:
        for dim in self.explicit:
            if new := new_name(f"rules.{dim}", [f"rules.{known}" for known in DIMS]):
                raise ValueError(f"rules.{dim} is now {new}")
        return self

    @property
    def explicit(self) -> dict[str, tuple[str, ...]]:
        """The user's own rules, without those of presets."""
        return dict(self.__pydantic_extra__ or {})

    @property
    def table(self) -> dict[str, tuple[str, ...]]:
        """Every dim that has a rule, and its axes."""
        joined = {dim: axes for dim, (axes, _) in _join(self.preset).items() if dim != "zero"}
        standard: dict[str, tuple[str, ...]] = dict.fromkeys(DIMS, ()) if self.preset else {}
        if LARGEST in self.explicit:
            standard[UNNAMED] = ()
        return standard | joined | self.explicit

    @property
    def zero_stage(self) -> int:
        return self.zero if self.zero is not None else _join(self.preset).get("zero", (3, ""))[0]

    def __getitem__(self, dim: str) -> tuple[str, ...]:
        """The axes of a dim. Dims of activations without a rule are not sharded."""
        return self.table.get(dim, ()) if dim in ACTIVATION_DIMS else self.table[dim]

    def __or__(self, other: AxisRules) -> AxisRules:
        problems = Problems()
        mine = self.explicit | {"zero": self.zero}
        theirs = other.explicit | {"zero": other.zero}
        for dim in [dim for dim in mine if dim in theirs]:
            if None not in (mine[dim], theirs[dim]) and mine[dim] != theirs[dim]:
                problems.add(f"rules.{dim}", f"{_text(mine[dim])} and {_text(theirs[dim])}", "keep one of the two")
        problems.raise_any(ShardingError, "two rules disagree:")
        return AxisRules(
            preset=tuple(dict.fromkeys(self.preset + other.preset)),
            **mine | {dim: value for dim, value in theirs.items() if value is not None},  # pyright: ignore
        )

    def source(self, dim: str) -> str:
        """The source of the rule for `dim`, as text: `preset fsdp`, `rules.embed`, `default`."""
        if dim in self.explicit:
            return f"rules.{dim}"
        return f"preset {_join(self.preset)[dim][1]}" if dim in _join(self.preset) else "default"

    def use(self, dim: str, axis: str) -> Use:
        """How an axis is used for a dim that is sharded over it.

        >>> rules = AxisRules(preset=("fsdp", "megatron"), experts=("fsdp",))
        >>> rules.use("embed", "fsdp"), rules.use("heads", "tensor"), rules.use("experts", "fsdp")
        ('storage', 'partition', 'dispatch')
        """
        if dim in TOKENS or not any(axis in self[tokens] for tokens in TOKENS):
            return "partition"
        return "dispatch" if dim in DISPATCHED else "storage"

    def partition_axes(self, dim: str) -> tuple[str, ...]:
        """The axes over which a dim of an activation is sharded. Only `TOKENS` are sharded over axes of tokens."""
        return tuple(axis for axis in self.table.get(dim, ()) if self.use(dim, axis) == "partition")

    def storage_axes(self, dim: str) -> tuple[str, ...]:
        """The axes over which a dim of a parameter is stored in shards and gathered before use."""
        return tuple(axis for axis in self[dim] if self.use(dim, axis) == "storage")

    def dispatch_axes(self, dim: str) -> tuple[str, ...]:
        """The axes over which a dim is sharded, and whose devices send tokens to the shards."""
        return tuple(axis for axis in self.table.get(dim, ()) if self.use(dim, axis) == "dispatch")


Rules = Coerced[AxisRules, str | list[str] | dict[str, Any]]


@cache
def _join(presets: tuple[str, ...]) -> dict[str, tuple[Any, str]]:
    """The joined tables of presets: dim -> (value, name of the preset that sets it)."""
    joined: dict[str, tuple[Any, str]] = {}
    problems = Problems()
    for name in presets:
        for dim, value in PRESETS[name].items():
            before, by = joined.setdefault(dim, (value, name))
            if dim == "batch":  # a preset may add axes that carry rows
                if added := tuple(axis for axis in value if axis not in before):
                    joined[dim] = ((*before, *added), name)
            elif before != value:
                what = f"preset {by} sets {_text(before)}, preset {name} sets {_text(value)}"
                problems.add(f"rules.{dim}", what, "keep one of the two presets")
    problems.raise_any(ShardingError, "two rules disagree:")
    return joined


def _text(value: Any) -> str:
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else str(value)
