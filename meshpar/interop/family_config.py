"""Reads the `config.json` of a family: each key acts, or is refused, or is known to change nothing."""

from __future__ import annotations

import json

from meshpar.errors import Problems, excerpt, nearest
from meshpar.interop import architectures
from meshpar.models.config_classes import CONFIG_CLASSES, ConfigClass
from meshpar.models.families import FAMILIES, REFUSED
from meshpar.models.families.family import Family
from meshpar.models.families.keys import ORIGINAL, Keys
from meshpar.models.families.options import DecoderOptions
from meshpar.models.foreign import REQUIRED, WITHOUT_EFFECT, Json

OF_TRAINING = frozenset({
    "residual_dropout", "embedding_dropout", "hidden_dropout", "dropout", "layerdrop", "init_std", "input_jitter_noise",
})  # fmt: skip
"""Keys of the classes of families that act only in a training by transformers: dropout, and the first weights."""
UNUSED = frozenset({
    "eod_token_id", "slow_but_exact", "num_mtp_layers", "num_nextn_predict_layers", "pretraining_tp",
})  # fmt: skip
"""Keys of these classes that no forward reads. Layers that predict a second token (MTP) are not part of the model."""


def family_of(config: Json) -> Family | None:
    kind = config.get("model_type")
    return FAMILIES.get(kind) if isinstance(kind, str) else None


def options_of(config: Json, where: str, problems: Problems) -> DecoderOptions | None:
    """The decoder that a `config.json` describes; None if it is refused, with the reasons in `problems`.

    Args:
      where: the file's name in the problems.
    """
    kind = config.get("model_type")
    family = family_of(config)
    if family is None:
        why = REFUSED.get(str(kind), "is not supported")
        known = sorted({*architectures.ARCHITECTURES, *FAMILIES})
        near = None if kind in REFUSED else nearest(str(kind), known)
        fix = f"supported: {', '.join(known)}" + (f"; did you mean {near}?" if near else "")
        problems.add(f"{where}: model_type", f"{excerpt(repr(kind))} {why}", fix)
        return None
    found = Problems()
    own = CONFIG_CLASSES[family.called or str(kind)]
    read = {key: value for key, value in config.items() if key not in family.computed}
    given = architectures.completed(read, own, found)
    if ORIGINAL in config and ORIGINAL not in own.defaults:  # which transformers reads from any config
        given[ORIGINAL] = config[ORIGINAL]
    keys = Keys(given, found)
    options = family.read(keys)
    check_unread(keys, own)
    window = getattr(options.layers[0].attention, "window", None)
    architectures.check_layer_types(config, own, window, len(options.layers), found)
    problems.extend(found, f"{where}: ")
    return None if found else options


def check_unread(keys: Keys, own: ConfigClass) -> None:
    """Refuses another value than the default of a key that nothing read."""
    known = {problem.where for problem in keys.found.found}
    for key, value in keys.given.items():
        default = own.defaults.get(key)
        is_neutral = value == default or (value in (None, False) and default in (None, False))
        if key in keys.read | known | WITHOUT_EFFECT | OF_TRAINING | UNUSED | REQUIRED.keys() or is_neutral:
            continue
        what = f"is {excerpt(repr(value))}, and only {json.dumps(default)} is supported for {own.called}"
        keys.wrong(key, what, f"{key}: {json.dumps(default)}")
