"""Rules: which mesh axes each dim is sharded over.

Three laws say how an axis is used for a dim, with no second table for activations:

- **storage**: an axis that carries the batch carries nothing else in an *activation*. A parameter that is sharded over
  such an axis is stored there in shards, and gathered before use. That is ZeRO; `zero` says when it is gathered.
- **dispatch**: a dim that owns its part of the work (`experts`) is not gathered over an axis that carries the batch:
  devices exchange tokens instead.
- **partition**: every other axis shards parameters and activations alike. That is tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import pydantic

from meshpar.config import Config
from meshpar.errors import Problems, ShardingError, nearest
from meshpar.synonyms import new_name

DIMS = (
    "batch", "seq", "residual_seq", "positions", "embed", "heads", "kv_heads", "head_dim", "mlp", "vocab", "experts",
    "rank", "layers", "stage", "key_data",
)  # fmt: skip
ACTIVATION_DIMS = ("batch", "seq", "residual_seq", "stage")
DISPATCHED = ("experts",)
"""Dims whose parts stay where they are stored: tokens travel to them."""

Use = Literal["partition", "storage", "dispatch"]

_BATCH = {"batch": ("replica", "data", "fsdp")}
_SHARDED = _BATCH | {"embed": ("fsdp",)}
_MEGATRON = _BATCH | dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), ("tensor",))

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Every parameter whole on every device; gradients all-reduced.
    "replicated": _BATCH,
    # Rajbhandari et al. 2020, "ZeRO": what is sharded over fsdp is the optimizer state; and the gradients and
    # stored parameters; and the parameters during the step.
    "zero1": _SHARDED | {"zero": 1},
    "zero2": _SHARDED | {"zero": 2},
    "fsdp": _SHARDED | {"zero": 3},
    # The same rules: a mesh with replica > 1 or data > 1 is what makes it hybrid (sharded inside, copied across).
    "hsdp": _SHARDED | {"zero": 3},
    # Shoeybi et al. 2019, "Megatron-LM"; and Korthikanti et al. 2022: norms and residuals sharded over seq.
    "megatron": _MEGATRON,
    "megatron_sp": _MEGATRON | {"residual_seq": ("tensor",)},
    # A stage of the pipeline holds its own layers.
    "pipeline": _BATCH | {"layers": ("pipe",), "stage": ("pipe",)},
}


class AxisRules(Config):
    """Presets, and beside them any `dim=[axes]` that goes before theirs. In a config: `rules: [fsdp, megatron]`.

    `seq` is the sequence as attention sees it, `residual_seq` as norms, residuals and dropout do: Megatron's
    sequence parallelism is a rule for the second. With a preset, each of the standard `DIMS` that none
    names is not sharded; without one, every dim of every parameter needs a rule of its own.

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
    zero: Literal[0, 1, 2, 3] | None = None
    """Where a parameter that is sharded over a batch axis is gathered: 1 it is stored whole, and only its
    optimizer state is sharded; 2 once a step; 3 in each layer, again in the backward. Default: the preset's, or 3."""

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
        """The rules that the user wrote, without the presets'."""
        return dict(self.__pydantic_extra__ or {})

    @property
    def table(self) -> dict[str, tuple[str, ...]]:
        """Every dim that has a rule, and its axes."""
        joined = {dim: axes for dim, (axes, _) in _join(self.preset).items() if dim != "zero"}
        standard = dict.fromkeys(DIMS, ()) if self.preset else {}
        return standard | joined | self.explicit

    @property
    def zero_stage(self) -> int:
        return self.zero if self.zero is not None else _join(self.preset).get("zero", (3, ""))[0]

    def __getitem__(self, dim: str) -> tuple[str, ...]:
        """The axes of a dim. A dim of activations that no rule names is not sharded."""
        return self.table.get(dim, ()) if dim in ACTIVATION_DIMS else self.table[dim]

    def __or__(self, other: AxisRules) -> AxisRules:
        problems = Problems()
        mine, theirs = self.explicit | {"zero": self.zero}, other.explicit | {"zero": other.zero}
        for dim in [dim for dim in mine if dim in theirs]:
            if None not in (mine[dim], theirs[dim]) and mine[dim] != theirs[dim]:
                problems.add(f"rules.{dim}", f"{_text(mine[dim])} and {_text(theirs[dim])}", "keep one of the two")
        problems.raise_any(ShardingError, "two rules disagree:")
        return AxisRules(
            preset=tuple(dict.fromkeys(self.preset + other.preset)),
            **mine | {dim: value for dim, value in theirs.items() if value is not None},  # pyright: ignore
        )

    def source(self, dim: str) -> str:
        """Where the rule for `dim` comes from, for people: `preset fsdp`, `rules.embed`, `default`."""
        if dim in self.explicit:
            return f"rules.{dim}"
        return f"preset {_join(self.preset)[dim][1]}" if dim in _join(self.preset) else "default"

    def use(self, dim: str, axis: str) -> Use:
        """How an axis is used for a dim that is sharded over it.

        >>> rules = AxisRules(preset=("fsdp", "megatron"), experts=("fsdp",))
        >>> rules.use("embed", "fsdp"), rules.use("heads", "tensor"), rules.use("experts", "fsdp")
        ('storage', 'partition', 'dispatch')
        """
        if dim == "batch" or axis not in self["batch"]:
            return "partition"
        return "dispatch" if dim in DISPATCHED else "storage"

    def partition_axes(self, dim: str) -> tuple[str, ...]:
        """The axes of a dim of an activation: the batch's own, or those that carry no batch."""
        return tuple(axis for axis in self.table.get(dim, ()) if self.use(dim, axis) == "partition")

    def storage_axes(self, dim: str) -> tuple[str, ...]:
        """The axes over which a dim of a parameter is stored in shards, and gathered before use."""
        return tuple(axis for axis in self[dim] if self.use(dim, axis) == "storage")


def _join(presets: Sequence[str]) -> dict[str, tuple[Any, str]]:
    """What the presets say together: dim -> (value, name of the preset that says so)."""
    said: dict[str, tuple[Any, str]] = {}
    problems = Problems()
    for name in presets:
        for dim, value in PRESETS[name].items():
            before, by = said.setdefault(dim, (value, name))
            if before != value:
                what = f"preset {by} says {_text(before)}, preset {name} says {_text(value)}"
                problems.add(f"rules.{dim}", what, "keep one of the two presets")
    problems.raise_any(ShardingError, "two rules disagree:")
    return said


def _text(value: Any) -> str:
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else str(value)
