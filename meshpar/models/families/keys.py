"""Reads the keys of a `config.json`, and keeps which were read: a key that nothing reads acts on nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from meshpar.errors import Problems, excerpt, nearest
from meshpar.models.families.layers import HIDDEN_ACTS
from meshpar.models.families.options import Activation, Rope
from meshpar.models.foreign import LARGEST, Json

MOST_LAYERS = 2**12
MOST_EXPERTS = 2**16
"""The largest numbers that are accepted, so that a damaged config cannot list tensors without end."""
SLIDING = "sliding_attention"
FULL = "full_attention"
_YARN = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
ORIGINAL = "original_max_position_embeddings"
ROPE_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "yarn": {"factor", ORIGINAL, *_YARN},
    "longrope": {"factor", ORIGINAL, "attention_factor", "short_factor", "long_factor", "short_mscale", "long_mscale"},
    "llama3": {"factor", ORIGINAL, "low_freq_factor", "high_freq_factor"},
}
"""Kind of rotary scaling -> the keys that it reads."""


class Keys:
    """The values of a config class, each read by its type. A wrong one is reported, and a harmless one returned.

    Args:
      given: the completed config, see `architectures.completed`.
      found: gets the problems.
    """

    def __init__(self, given: Json, found: Problems):
        self.given, self.found = given, found
        self.read: set[str] = set()

    def value(self, key: str) -> Any:
        self.read.add(key)
        return self.given.get(key)

    def wrong(self, key: str, what: str, fix: str = "") -> None:
        self.found.add(key, what, fix)

    def size(self, key: str, least: int = 1, most: int = LARGEST) -> int:
        value = self.value(key)
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return value
        self.wrong(key, f"is {excerpt(repr(value))}, not a whole number from {least} to {most}")
        return max(least, 1)

    def some_size(self, key: str, default: int | None = None) -> int | None:
        """A size that may be null."""
        return default if self.value(key) is None else self.size(key)

    def number(self, key: str) -> float:
        value = self.value(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        self.wrong(key, f"is {excerpt(repr(value))}, not a finite number")
        return 1.0

    def some_number(self, key: str) -> float | None:
        return None if self.value(key) is None else self.number(key)

    def flag(self, key: str) -> bool:
        value = self.value(key)
        if value is None or isinstance(value, bool):
            return bool(value)
        self.wrong(key, f"is {excerpt(repr(value))}, neither true nor false")
        return False

    def choice(self, key: str, known: Sequence[str]) -> str:
        value = self.value(key)
        if value in known:
            return value
        near = nearest(str(value), known)
        fix = f"supported: {', '.join(known)}" + (f"; did you mean {near}?" if near else "")
        self.wrong(key, f"{excerpt(repr(value))} is not supported for this model", fix)
        return known[0]

    def act(self, key: str = "hidden_act") -> Activation:
        return HIDDEN_ACTS[self.choice(key, list(HIDDEN_ACTS))]  # pyright: ignore[reportReturnType]

    def only(self, key: str, value: Any, why: str) -> None:
        """Refuses every value of a key but one."""
        if self.value(key) != value:
            self.wrong(key, f"is {excerpt(repr(self.given.get(key)))}, and {why}")

    @property
    def num_layers(self) -> int:
        return self.size("num_hidden_layers", most=MOST_LAYERS)

    def kv_heads(self, heads: int, key: str = "num_key_value_heads") -> int:
        """The number of key heads, which divides that of query heads."""
        kv_heads = self.some_size(key, heads) or heads
        if heads % kv_heads:
            self.wrong(key, f"is {kv_heads}, which does not divide the {heads} query heads")
            return heads
        return kv_heads

    @property
    def head_dim(self) -> int:
        """The size of a head; by default its part of the residual stream."""
        width, heads = self.size("hidden_size"), self.size("num_attention_heads")
        found = self.some_size("head_dim") if "head_dim" in self.given else None
        if found is None and width % heads:
            self.wrong("hidden_size", f"is {width}, no multiple of the {heads} heads")
        return found or max(1, width // heads)

    def layer_list(self, key: str, default: Sequence[Any], known: Sequence[Any]) -> list[Any]:
        """One value for each layer; `default` if it is null."""
        value = self.value(key)
        if value is None:
            return [*default]
        if not isinstance(value, list) or len(value) != len(default):
            self.wrong(key, f"is {excerpt(repr(value))}, not a list of {len(default)} entries, one for each layer")
            return [*default]
        for one in value:
            if one not in known:
                what = f"{excerpt(repr(one))} is not supported for this model"
                self.wrong(key, what, f"supported: {', '.join(map(str, known))}")
                return [*default]
        return value

    def index_list(self, key: str) -> list[int]:
        """A list of indices; empty if it is null."""
        value = self.value(key)
        if value is None or (isinstance(value, list) and all(isinstance(one, int) for one in value)):
            return value or []
        self.wrong(key, f"is {excerpt(repr(value))}, not a list of indices of layers")
        return []

    def num_experts(self, key: str) -> int:
        return self.size(key, most=MOST_EXPERTS)

    def per_token(self, key: str) -> int:
        """The number of experts that a token uses, of those that `key` counts."""
        return min(self.size("num_experts_per_tok", most=self.num_experts(key)), self.num_experts(key))

    def groups(self, key: str) -> dict[str, Any]:
        """The groups of experts, and of how many a token chooses its own."""
        num, groups = self.num_experts(key), self.size("n_group")
        kept = self.size("topk_group", most=groups)
        if num % groups:
            self.wrong("n_group", f"is {groups}, which does not divide the {num} experts")
            return {}
        if num // groups * kept < self.per_token(key):
            self.wrong("topk_group", f"is {kept}: those groups have fewer experts than a token uses")
        return {"groups": groups, "groups_per_token": kept}

    def yarn_scale(self) -> float:
        """The factor by which queries and keys grow under YaRN, in models that scale the scores (DeepSeek)."""
        key, given = self._rope_mapping(None, None)
        all_dims = given.get("mscale_all_dim")
        if (given.get("rope_type") or given.get("type") or "default") == "default" or not all_dims:
            return 1.0
        factor = self._positive(key, "factor", given.get("factor"))
        return 1.0 if factor <= 1 else 0.1 * self._positive(key, "mscale_all_dim", all_dims) * math.log(factor) + 1.0

    def windows(self, default: Sequence[str]) -> list[int | None]:
        """The window of each layer, by `layer_types` and `sliding_window`."""
        types = self.layer_list("layer_types", default, (SLIDING, FULL))
        window = self.some_size("sliding_window")
        if window is None and SLIDING in types:
            self.wrong("sliding_window", f"is null, and layer_types has {SLIDING}", "layer_types: null, or a window")
        return [window if one == SLIDING else None for one in types]

    def windows_but_every(self, count: int) -> list[int | None]:
        """The same, where by default each layer has a window, but every `count`-th."""
        return self.windows([SLIDING if (i + 1) % count else FULL for i in range(self.num_layers)])

    def ropes(self, full: float | None, sliding: float) -> dict[str, Rope]:
        """Rotary positions of each type of layers, with the bases where `rope_parameters` has none; see `rope`."""
        return {kind: self.rope(of_layers=kind, theta=theta) for kind, theta in ((FULL, full), (SLIDING, sliding))}

    # Rotary positions ------------------------------------------------------------------------------------------

    def rope(
        self, head_dim: int | None = None, *, fraction: float | None = None, is_interleaved: bool = False,
        is_unzipped: bool = False, of_layers: str | None = None, theta: float | None = None, plain: Json | None = None,
        own: Sequence[str] = (),
    ) -> Rope:  # fmt: skip
        """Rotary positions by `rope_parameters`, or by `rope_scaling` of earlier versions, which comes first.

        Args:
          head_dim: by default that of the config.
          fraction: the default fraction of a head that is rotated; None if the model rotates whole heads.
          of_layers: the type of layers that these are of, for which `rope_parameters` has a mapping of its own.
          theta: the base where the mapping has none; default: the key `rope_theta`.
          plain: the mapping that stands for a missing one.
          own: keys of the mapping that this model has besides.
        """
        key, given = self._rope_mapping(of_layers, plain)
        base = self.value("rope_theta") if theta is None else theta
        kind = given.get("rope_type") or given.get("type") or "default"
        if kind not in ROPE_KEYS:
            near = nearest(str(kind), ROPE_KEYS)
            fix = f"supported: {', '.join(ROPE_KEYS)}" + (f"; did you mean {near}?" if near else "")
            self.wrong(key, f"rope_type {excerpt(repr(kind))} is not supported", fix)
            kind = "default"
        self._check_rope_keys(key, given, kind, own)
        base = self._positive(key, "rope_theta", given.get("rope_theta", base))
        rotated = int((head_dim or self.head_dim) * self._fraction(key, given, fraction))
        if rotated % 2 or not rotated:
            self.wrong(key, f"{rotated} elements of a head are rotated, in pairs, and {rotated} is odd or 0")
            rotated = 2
        numbers, limit = self._rope_numbers(key, given, kind, rotated)
        return Rope(
            dim=rotated, theta=base, kind=kind, numbers=tuple(sorted(numbers.items())), limit=limit,
            is_interleaved=is_interleaved, is_unzipped=is_unzipped,
        )  # fmt: skip

    def rope_number(self, name: str, plain: Json) -> float:
        """A number of the mapping of rotary positions that the model itself reads; 0 if it is missing."""
        key, given = self._rope_mapping(None, plain)
        return 0.0 if given.get(name) is None else self._positive(key, name, given[name])

    def _rope_mapping(self, of_layers: str | None, plain: Json | None) -> tuple[str, Json]:
        older, newer = self.value("rope_scaling"), self.value("rope_parameters")
        if of_layers is None:
            key, given = ("rope_scaling", older) if older else ("rope_parameters", newer if newer else plain or {})
        else:
            nested = newer if isinstance(newer, dict) else {}
            key, given = f"rope_parameters.{of_layers}", nested.get(of_layers) or {"rope_type": "default"}
            if older and of_layers == FULL and isinstance(older, dict) and isinstance(given, dict):
                key, given = "rope_scaling", given | {"rope_type": "default"} | older
            for other in nested.keys() - {FULL, SLIDING}:
                what = "is not of one type of layers, and this model has rope parameters for each"
                self.wrong(f"rope_parameters.{other}", what, f"rope_parameters: {{{FULL}: ..., {SLIDING}: ...}}")
        if not isinstance(given, dict) or any(isinstance(one, dict) for one in given.values()):
            self.wrong(key, "has to be one mapping of numbers, the same for all layers")
            return key, {}
        return key, given

    def _check_rope_keys(self, key: str, given: Json, kind: str, own: Sequence[str]) -> None:
        known = ROPE_KEYS[kind] | {*own, "rope_type", "type", "rope_theta", "partial_rotary_factor"}
        for name in given.keys() - known:
            if given[name] is None:
                continue
            near = nearest(name, known)
            fix = "leave it out" + (f"; did you mean {near}?" if near else "")
            self.wrong(f"{key}.{name}", f"rope_type {kind} has no such key", fix)

    def _positive(self, key: str, name: str, value: Any) -> float:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf:
            return float(value)
        self.wrong(f"{key}.{name}", f"is {excerpt(repr(value))}, not a positive number")
        return 1.0

    def _fraction(self, key: str, given: Json, fraction: float | None) -> float:
        values = (given.get("partial_rotary_factor"), self.value("partial_rotary_factor"), fraction, 1.0)
        value = self._positive(key, "partial_rotary_factor", next(one for one in values if one is not None))
        if value > 1 or (fraction is None and value != 1):
            what = f"is {value}, and this model rotates {'at most' if fraction else ''} whole heads"
            self.wrong(f"{key}.partial_rotary_factor", what)
            return 1.0
        return value

    def _rope_numbers(self, key: str, given: Json, kind: str, rotated: int) -> tuple[dict[str, Any], int]:
        """The numbers of a scaling, complete, and the length up to which rows are short."""
        longest = self.size("max_position_embeddings")
        if kind == "default":
            return {}, 0
        original = self.value(ORIGINAL) or given.get(ORIGINAL) or longest
        original = self._positive(key, ORIGINAL, original)
        factor = given.get("factor")
        if factor is None and kind in ("yarn", "longrope"):
            factor = longest / original
        factor = self._positive(key, "factor", factor)
        if kind == "llama3":
            names = ("low_freq_factor", "high_freq_factor")
            bounds = {name: self._positive(key, name, given.get(name)) for name in names}
            if bounds["high_freq_factor"] <= bounds["low_freq_factor"]:
                self.wrong(f"{key}.high_freq_factor", "has to be larger than low_freq_factor")
                bounds["high_freq_factor"] = bounds["low_freq_factor"] + 1
            return {"factor": factor, ORIGINAL: original} | bounds, 0
        if kind == "yarn":
            return self._yarn(key, given, factor, original), 0
        if kind == "longrope":
            return self._longrope(key, given, factor, original, rotated), int(original)
        return {"factor": factor}, longest if kind == "dynamic" else 0

    def _yarn(self, key: str, given: Json, factor: float, original: float) -> dict[str, Any]:
        def scaled(mscale: float) -> float:
            return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

        one, all_dims = given.get("mscale"), given.get("mscale_all_dim")
        attention = given.get("attention_factor")
        if attention is None:
            attention = scaled(one) / scaled(all_dims) if one and all_dims else scaled(1)
        return {
            "factor": factor, ORIGINAL: original,
            "attention_factor": self._positive(key, "attention_factor", attention),
            "beta_fast": self._positive(key, "beta_fast", given.get("beta_fast") or 32),
            "beta_slow": self._positive(key, "beta_slow", given.get("beta_slow") or 1),
            "truncate": float(given.get("truncate", True) is not False),
        }  # fmt: skip

    def _longrope(self, key: str, given: Json, factor: float, original: float, rotated: int) -> dict[str, Any]:
        attention = given.get("attention_factor")
        if attention is None:
            is_short = factor <= 1 or original <= 1
            attention = 1.0 if is_short else math.sqrt(1 + math.log(factor) / math.log(original))
        numbers: dict[str, Any] = {"attention_factor": self._positive(key, "attention_factor", attention)}
        for name in ("short_factor", "long_factor"):
            values = given.get(name)
            is_list = isinstance(values, list) and len(values) == rotated // 2
            if not is_list:
                self.wrong(f"{key}.{name}", f"is not a list of {rotated // 2} numbers, one for each pair of a head")
            parts = values if is_list and values else [1.0] * (rotated // 2)
            numbers[name] = tuple(self._positive(key, name, one) for one in parts)
        for name in ("short_mscale", "long_mscale"):
            if given.get(name) is not None:
                numbers[name] = self._positive(key, name, given[name])
        return numbers
