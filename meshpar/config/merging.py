"""How two layers of a config become one: a file over the one that it extends, an override over the files.

Mappings are merged key by key. Where the upper layer says another `kind`, the keys that both kinds know stay. A key
that the new kind does not know is a problem, unless the upper layer says `key: null`, which drops it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshpar.config.annotations import chosen, fields, kind_of, kinds, models
from meshpar.config.model import Config
from meshpar.config.shorthand import expand, unfold
from meshpar.errors import Problems


class Whole(dict[str, Any]):
    """A mapping that replaces what is below it: one that is given on the command line."""


def merge(annotation: Any, under: Any, over: Any, where: str, sources: Mapping[str, str], problems: Problems) -> Any:
    """`over`, and what `under` says beside it, with every shorthand written out.

    Args:
      where: the dotted path of both.
    """
    unfolded = unfold(annotation, over)
    if isinstance(over, Whole) or not (isinstance(under, dict) and isinstance(unfolded, dict)):
        return expand(annotation, unfolded)
    new_kind = unfolded.get("kind", under.get("kind"))
    model = chosen(annotation, {"kind": new_kind})
    over = {
        key: value for key, value in unfolded.items() if value is not None or not _is_dropped(key, annotation, model)
    }
    if new_kind != under.get("kind") and under.get("kind") in kinds(annotation) and new_kind in kinds(annotation):
        under = _of_kind(model, under, unfolded, where, sources, problems)
    known = fields(model)
    merged = dict(under)
    for key, value in over.items():
        inner = f"{where}.{key}" if where else key
        merged[key] = merge(known.get(key), under.get(key), value, inner, sources, problems)
    return merged


def _is_dropped(key: str, annotation: Any, model: type[Config]) -> bool:
    """Whether null drops this key: another kind knows it, and the chosen one does not."""
    return key not in fields(model) and any(key in fields(other) for other in models(annotation))


def _of_kind(
    model: type[Config], under: dict[str, Any], over: dict[str, Any], where: str, sources: Mapping[str, str],
    problems: Problems,
) -> dict[str, Any]:  # fmt: skip
    """What stays of a mapping that was of another kind."""
    known = fields(model)
    lost = [key for key in under if key not in known and key not in over]
    if lost:
        source = sources.get(f"{where}.kind", sources.get(where, ""))
        place = f"{where}.kind ({source})" if source else f"{where}.kind"
        what = f"kind {kind_of(model)} does not know {', '.join(lost)}, set for kind {under['kind']}"
        fix = f"{' '.join(f'{where}.{key}=null' for key in lost)} to drop {'it' if len(lost) == 1 else 'them'}"
        problems.add(place, what, f"{fix}, or {where}={{kind: {kind_of(model)}, ...}} to begin anew")
    return {key: value for key, value in under.items() if key in known}
