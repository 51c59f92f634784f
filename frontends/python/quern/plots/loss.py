"""Plots training runs from their logs: loss, validation loss and learning rate.

    quern-tools plot loss runs/demo -o loss.png --reference "unigram entropy=6.44"
    quern-tools plot loss runs/bf16 runs/e4m3 -o formats.png

A run is its folder (with a log.jsonl) or the log itself. A log still being written is fine.
"""

import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from quern.plots import picture
from quern.base.arguments import path_argument
from quern.runs.run_log import Run, drawable, read_runs

RAW = 0.28  # opacity of the unsmoothed line
MAX_SMOOTHING = 300  # points


def smooth(values: Sequence[float], width: float) -> npt.NDArray[np.float64]:
    """Centred Gaussian mean with standard deviation `width` in points: no lag; gaps stay gaps."""
    row = np.array(values, float)
    known = np.isfinite(row)
    reach = math.ceil(3 * width)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / max(width, 1e-9)) ** 2)

    def blur(raw: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.convolve(raw, kernel)[reach : reach + raw.size]

    return np.where(known, blur(np.where(known, row, 0)) / np.maximum(blur(known.astype(float)), 1e-9), np.nan)


def parse_reference(text: str) -> tuple[str, float]:
    label, _, value = text.rpartition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if math.isnan(drawable(number)):
        raise ArgumentTypeError(f"found '{text}', expected LABEL=NUMBER")
    return label, number


def label_references(axes: Axes, references: Iterable[tuple[str, float]]) -> None:
    for label, value in references:
        axes.axhline(value, color=picture.MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        axes.annotate(
            picture.label(f"{label} {value:g}"), (1, value), xycoords=("axes fraction", "data"), xytext=(-4, 3),
            textcoords="offset points", ha="right", va="bottom", fontsize=9, color=picture.MUTED,
        )


def draw(runs: Sequence[Run], references: Iterable[tuple[str, float]], x_axis: str) -> Figure:
    plt = picture.pyplot()
    figure: Figure
    figure, (loss, rate) = plt.subplots(
        2, 1, sharex=True, figsize=(8, 5.6), height_ratios=(4, 1), layout="constrained"
    )
    palette = plt.get_cmap("tab10").colors
    for index, run in enumerate(runs):
        color = palette[index % len(palette)]
        xs, losses = run.series("step", x_axis, "loss")
        eval_xs, eval_losses = run.series("eval", x_axis, "loss")
        alone = len(runs) == 1
        last = f"validation, last {eval_losses[-1]:.3f}" if eval_xs else "no validation yet"
        if xs:
            width = min(len(xs) / 100, MAX_SMOOTHING)
            loss.plot(xs, losses, color=color, linewidth=0.7, alpha=RAW)
            loss.plot(xs, smooth(losses, width), color=color, linewidth=1.6, label="training" if alone else "")
        loss.plot(
            eval_xs, eval_losses, color=picture.INK if alone else color, linestyle="none",
            marker="o", markersize=5, markeredgecolor="white", markeredgewidth=0.8, zorder=3,
            label=last if alone else picture.label(f"{run.name}: {last}"),
        )
        rate.plot(*run.series("step", x_axis, "lr"), color=color, linewidth=1.3)

    label_references(loss, references)
    title = ", ".join(run.name for run in runs) if len(runs) <= 3 else f"{len(runs)} runs"
    loss.set_title(picture.label(title), loc="left")
    loss.set_ylabel("loss (nats per token)")
    rate.set_ylabel("learning rate")
    rate.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    rate.set_ylim(bottom=0)
    rate.set_xlabel("training tokens" if x_axis == "tokens" else "step")
    rate.xaxis.set_major_formatter(EngFormatter(sep=""))
    for axes in (loss, rate):
        picture.add_grid(axes)
    loss.legend(frameon=False, loc="upper right", ncols=1 + (len(runs) > 4))
    return figure


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=path_argument, metavar="RUN", help="a run's folder, or its log.jsonl")
    parser.add_argument(
        "-o", "--out", type=path_argument, default=Path("loss.png"), help="picture (default: loss.png)"
    )
    parser.add_argument(
        "--reference", type=parse_reference, action="append", default=[], metavar="LABEL=LOSS",
        help='a horizontal line, such as "unigram entropy=6.44"; may be repeated',
    )
    parser.add_argument("--x", choices=("tokens", "step"), default="tokens", help="horizontal axis")


def main(options: Namespace) -> None:
    picture.save(draw(read_runs(options.runs), options.reference, options.x), options.out)
    print(options.out)
