"""`meshpar checkpoint`: `ls`, `show`, `verify`, `diff`. They only read."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshpar.cli.app import AsJson, Verbs, app, echo_either

if TYPE_CHECKING:
    from meshpar.checkpoint.difference import ChangedArray, Difference
    from meshpar.checkpoint.saved import Checkpoint

verbs = Verbs(no_args_is_help=True)
app.add_typer(verbs, name="checkpoint", help="Lists, shows, verifies and compares checkpoints.")

NOT_VERIFIED = "The arrays were not verified: `meshpar checkpoint verify` reads them."

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A run's folder, or a checkpoint's.", show_default=False)]


@verbs.command()
def ls(folder: Folder, json: AsJson = False) -> None:
    """Lists the checkpoints of a run. Verifies meta.json and all file sizes."""
    from meshpar.checkpoint.saved import find_all
    from meshpar.inspection.report.table import table

    rows = _with_best([_row(saved) for saved in find_all(folder)])
    metric = next((row["metric"] for row in rows if row.get("metric")), "metric")
    shown = table(["step", "saved", "size", metric, ""], [_cells(row) for row in rows])
    damaged = [row["damaged"] for row in rows if "damaged" in row]
    echo_either("\n".join([shown, "", *damaged, NOT_VERIFIED]), rows, json)


@verbs.command()
def show(folder: Folder, json: AsJson = False) -> None:
    """Shows the contents of a run's last checkpoint, or of the one in DIR. Verifies meta.json and all file sizes."""
    from meshpar.checkpoint.saved import find

    saved = find(folder, include=())
    saved.check_sizes()
    echo_either(_text(saved), _shown(saved), json)


@verbs.command()
def verify(folder: Folder, json: AsJson = False) -> None:
    """Verifies the checksums of all files of a run's checkpoints, or of the one in DIR. Exits with 1 if any differs."""
    from meshpar.checkpoint.saved import find_all

    rows = [_verified(saved) for saved in find_all(folder)]
    damaged = [row["damaged"] for row in rows if "damaged" in row]
    whole = [f"{row['folder']} is whole: {row['num_files']} files" for row in rows if "damaged" not in row]
    echo_either("\n".join([*whole, *damaged]), rows, json)
    if damaged:
        raise typer.Exit(1)


@verbs.command()
def diff(before: Folder, after: Folder, json: AsJson = False) -> None:
    """Compares two checkpoints: their arrays, by dtype, shape and value, and their configs."""
    from meshpar.checkpoint.difference import difference
    from meshpar.checkpoint.saved import find

    found = difference(find(before), find(after))
    echo_either(_compared(found), found.as_json(), json)


def _verified(saved: Checkpoint) -> dict[str, Any]:
    from meshpar.errors import CheckpointError

    try:
        saved.verify()
    except CheckpointError as error:
        return {"folder": str(saved.folder), "damaged": str(error)}
    return {"folder": str(saved.folder), "num_files": saved.num_files}


def _row(saved: Checkpoint) -> dict[str, Any]:
    """The row of a checkpoint in `ls`; for a damaged one, the reason."""
    from meshpar.errors import CheckpointError

    try:
        saved.check_sizes()
        meta = saved.meta
        size = saved.size_bytes
    except CheckpointError as error:
        name = saved.folder.name
        return {"step": int(name) if name.isdecimal() else name, "folder": str(saved.folder), "damaged": str(error)}
    metric = {"metric": meta["metric"]["name"], "value": meta["metric"]["value"], "better": meta["metric"]["best"]}
    return {"step": meta["step"], "folder": str(saved.folder), "saved": meta["saved"], "size_bytes": size} | metric


def _with_best(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Marks the best checkpoint, by the metric of the latest."""
    from meshpar.checkpoint.retention import Retention

    whole = [row for row in rows if "damaged" not in row]
    like = [row for row in whole if row["metric"] == whole[-1]["metric"]]
    ranked = Retention(best=whole[-1]["better"]).ranked({row["step"]: row["value"] for row in like}) if whole else []
    return [row | {"best": row["step"] in ranked[:1]} for row in rows]


def _cells(row: dict[str, Any]) -> list[str]:
    from meshpar.tree import human_bytes

    if "damaged" in row:
        return [str(row["step"]), "damaged", "", "", ""]
    value = "" if row["value"] is None else f"{row['value']:.4f}"
    mark = "best" if row["best"] else ""
    return [str(row["step"]), row["saved"], human_bytes(row["size_bytes"]), value, mark]


def _shown(saved: Checkpoint) -> dict[str, Any]:
    """`meta.json`, with the bytes of the checkpoint and of each array."""
    import math

    import numpy as np

    arrays = {
        path: array | {"bytes": math.prod(array["shape"]) * np.dtype(array["dtype"]).itemsize}
        for path, array in saved.meta["arrays"].items()
    }
    return {"folder": str(saved.folder)} | saved.meta | {"size_bytes": saved.size_bytes, "arrays": arrays}


def _text(saved: Checkpoint) -> str:
    from meshpar.config import flatten_json
    from meshpar.inspection.report.table import table
    from meshpar.tree import human_bytes

    shown = _shown(saved)
    data = shown["data"]
    random = shown["random"]
    metric = shown["metric"]
    rows = [
        [path, f"{a['dtype']}{a['shape']}", f"({', '.join(a['dims'])})" if a["dims"] else "", human_bytes(a["bytes"])]
        for path, a in shown["arrays"].items()
    ]
    total = human_bytes(sum(array["bytes"] for array in shown["arrays"].values()))
    lines = [
        str(saved.folder),
        f"step {shown['step']}, saved {shown['saved']}, {human_bytes(shown['size_bytes'])}",
        f"{metric['name']}: {'not evaluated' if metric['value'] is None else metric['value']}",
        f"data: next batch {data['next_batch']}, {data['rows_read']} rows read, seed {data['seed']}",
        f"random: seed {random['seed']}, {random['impl']}, step {random['folded_in']} folded in",
        "",
        "config",
        *(f"  {key}: {json_format.dumps(value)}" for key, value in flatten_json(shown["config"]).items()),
        "",
        f"{len(rows)} arrays, {total}",
        table(None, rows),
        "",
        NOT_VERIFIED,
    ]
    return "\n".join(lines)


def _compared(found: Difference) -> str:
    from meshpar.inspection.report.table import table

    plain = json_format.dumps
    changed = [f"  {key}  {plain(before)} -> {plain(after)}" for key, (before, after) in found.config.items()]
    lines = [f"{folder}  step {step}" for folder, step in zip(found.folders, found.steps, strict=True)]
    lines += ["", "config" if changed else "config: no difference", *changed]
    lines += ["", f"arrays: {found.num_same} equal, {len(found.arrays)} not"]
    if found.arrays:
        lines.append(table(None, [_change(change) for change in found.arrays]))
    return "\n".join(lines)


def _change(change: ChangedArray) -> list[str]:
    sides = [side or "missing" for side in (change.before, change.after)]
    what = [change.path, " -> ".join(dict.fromkeys(sides))]
    if change.largest is None:
        return [*what, "", ""]
    return [*what, f"{change.num_different} differ", f"by at most {change.largest:.3g} ({change.relative:.2g})"]
