"""Merges two layers of a config: a file over the file that it extends, or an override over the files.

Mappings are merged key by key. Where the upper layer sets another `kind`, the keys that both kinds have are retained. A
key that the new kind does not have is a problem, unless the upper layer drops it with `key: null`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshpar.config.annotations import chosen, fields, kind_of, kinds, models
from meshpar.config.model import Config
from meshpar.config.shorthand import expand, unfold
from meshpar.errors import Problems


class Whole(dict[str, Any]):
    """A mapping from the command line. It replaces the lower mapping instead of being merged with it."""


def merge(annotation: Any, under: Any, over: Any, where: str, sources: Mapping[str, str], problems: Problems) -> Any:
    """`over`, with the keys that only `under` sets, and with every shorthand expanded.

    Args:
      where: the dotted path of both.
      sources: the place of each dotted path, for errors.
    """
    unfolded = unfold(annotation, over)
    is_whole = not isinstance(over, dict) and getattr(chosen(annotation, over), "shorthand_is_whole", False)
    replaces = isinstance(over, Whole) or is_whole
    if replaces or not (isinstance(under, dict) and isinstance(unfolded, dict)):
        return expand(annotation, unfolded)
    old_kind = under.get("kind")
    new_kind = unfolded.get("kind", old_kind)
    model = chosen(annotation, {"kind": new_kind})
    known = fields(model)
    of_other_kinds = {key for other in models(annotation) for key in fields(other) if key not in known}
    known_kinds = list(kinds(annotation))  # a kind in a config may be anything, a mapping too
    if new_kind != old_kind and new_kind in known_kinds and old_kind in known_kinds:
        under = _of_kind(model, under, unfolded, where, sources, problems)
    merged = dict(under)
    for key, value in unfolded.items():
        if value is not None or key not in of_other_kinds:  # null drops a key that only another kind has
            inner = f"{where}.{key}" if where else key
            merged[key] = merge(known.get(key), under.get(key), value, inner, sources, problems)
    return merged


def _of_kind(
    model: type[Config], under: dict[str, Any], over: dict[str, Any], where: str, sources: Mapping[str, str],
    problems: Problems,
) -> dict[str, Any]:  # fmt: skip
    """The keys of `under`, a mapping of another kind, that `model` has too; adds a problem if keys would be lost."""
    known = fields(model)
    lost = [key for key in under if key not in known and key not in over]
    if lost:
        source = sources.get(f"{where}.kind", sources.get(where, ""))
        place = f"{where}.kind ({source})" if source else f"{where}.kind"
        what = f"kind {kind_of(model)} does not have {', '.join(lost)}, set for kind {under['kind']}"
        fix = f"{' '.join(f'{where}.{key}=null' for key in lost)} to drop {'it' if len(lost) == 1 else 'them'}"
        problems.add(place, what, f"{fix}, or {where}={{kind: {kind_of(model)}, ...}} to start from its defaults")
    return {key: value for key, value in under.items() if key in known}
