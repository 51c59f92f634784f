"""Plots the quantized tensors of one run, from the scale records of its log (log.scales_every).

    quern-tools plot scales runs/e4m3 -o scales.png
    quern-tools plot scales runs/e4m3 --tensor 'd.*' --layer 0 --layer 23

A row for each tensor, a line for each layer: its amax; the amax as a share of what the largest scale covers (far below
1 the format's range is not used); the fractions of elements underflowed and, before the repair of a delayed scale,
clipped.
"""

import fnmatch
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from quern.plots import picture
from quern.base.arguments import integer, path_argument
from quern.base.fault import Fault
from quern.runs.run_log import FORMATS, Record, drawable, log_of, read_records

Tensors = dict[str, dict[int | None, dict[int, Record]]]  # tensor -> layer -> step -> its record

MOST_ROWS = 64  # that one picture shows


def read_scales(path: Path, patterns: Sequence[str] = (), layers: Sequence[int] = ()) -> Tensors:
    """A layer of None is outside the layers. Of what a resumed run repeats, the last stands."""
    log = log_of(path)
    tensors: Tensors = {}
    known = set()
    for _, record in read_records(log):
        if record["event"] != "scale":
            continue
        tensor, layer = record["tensor"], record.get("layer")
        covered = (record.get("scale") or 0) * FORMATS[record["format"]]  # no scale: nothing is finite and not zero
        record["share"] = record["amax"] / covered if covered and record["amax"] is not None else None
        known.add(tensor)
        chosen = not patterns or any(fnmatch.fnmatch(tensor, pattern) for pattern in patterns)
        if chosen and (not layers or layer is None or layer in layers):
            tensors.setdefault(tensor, {}).setdefault(layer, {})[record["step"]] = record
    if not known:
        raise Fault(log, "no scale records", advice="train in 8 bits with log.scales_every above 0")
    if not tensors:
        raise Fault(log, "no such tensor or layer", expected=f"tensors among {', '.join(sorted(known))}")
    if len(tensors) > MOST_ROWS:
        raise Fault(log, "too many tensors for a picture", len(tensors), f"at most {MOST_ROWS}", "choose with --tensor")
    return tensors


def series(records: dict[int, Record], key: str) -> list[list[float]]:
    """Steps and values of the records that have the key, in order."""
    points = [(step, drawable(record[key])) for step, record in sorted(records.items()) if record.get(key) is not None]
    return [list(column) for column in zip(*points)] or [[], []]


def draw(tensors: Tensors, title: str) -> Figure:
    plt = picture.pyplot(font_size=9)
    figure: Figure
    figure, grid = plt.subplots(
        len(tensors), 3, sharex=True, squeeze=False, figsize=(12, 0.8 + 1.7 * len(tensors)), layout="constrained"
    )
    figure.suptitle(picture.label(title), x=0.01, ha="left")
    depth = max((layer for layers in tensors.values() for layer in layers if layer is not None), default=0)
    color_map = plt.get_cmap("viridis")
    for (tensor, layers), (amax, share, lost) in zip(tensors.items(), grid):
        for layer, records in sorted(layers.items(), key=lambda item: -1 if item[0] is None else item[0]):
            color = picture.INK if layer is None else color_map(0.9 * layer / max(depth, 1))
            label = "" if layer is None else f"layer {layer}"
            amax.plot(*series(records, "amax"), color=color, linewidth=1, label=label)
            share.plot(*series(records, "share"), color=color, linewidth=1)
            lost.plot(*series(records, "underflowed"), color=color, linewidth=1)
            clipping = {step: record for step, record in records.items() if record.get("clipped")}
            lost.plot(*series(clipping, "clipped"), color=color, linestyle="none", marker="x", markersize=4)
        amax.set_ylabel(picture.label(tensor))
        amax.set_yscale("log", base=2)
        share.set_yscale("log", base=2)
        share.axhline(1, color=picture.MUTED, linewidth=1, linestyle=(0, (4, 3)))
        lost.set_yscale("symlog", linthresh=1e-6)
        lost.set_ylim(bottom=0)
        for axes in (amax, share, lost):
            picture.add_grid(axes)
    for axes, text in zip(grid[0], ("amax", "amax / (scale x largest code)", "underflowed (lines), clipped (x)")):
        axes.set_title(text, loc="left", fontsize=9)
    for axes in grid[-1]:
        axes.set_xlabel("step")
    handles, labels = max((row[0].get_legend_handles_labels() for row in grid), key=lambda pair: len(pair[1]))
    if labels:
        every = -(-len(labels) // 8)  # a key of eight is enough to read the colours by
        figure.legend(handles[::every], labels[::every], loc="outside upper right", ncols=8, frameon=False, fontsize=8)
    return figure


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", type=path_argument, metavar="RUN", help="a run's folder, or its log.jsonl")
    parser.add_argument(
        "-o", "--out", type=path_argument, default=Path("scales.png"), help="picture (default: scales.png)"
    )
    parser.add_argument(
        "--tensor", action="append", default=[], metavar="PATTERN", help="names to show, such as 'd.*'; may be repeated"
    )
    parser.add_argument("--layer", type=integer(0), action="append", default=[], help="layers to show; may be repeated")


def main(options: Namespace) -> None:
    tensors = read_scales(options.run, options.tensor, options.layer)
    picture.save(draw(tensors, log_of(options.run).resolve().parent.name), options.out)
    print(options.out)
