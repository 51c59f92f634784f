#!/usr/bin/env python3
"""Plots training runs from their logs: loss, validation loss and learning rate.

    scripts/plot.py runs/demo -o loss.png --reference "unigram entropy=6.44"
    scripts/plot.py runs/bf16 runs/e4m3 -o formats.png

A run is its folder (with a log.jsonl) or the log itself. A log still being written is fine.
"""

import argparse
import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

RAW, INK, MUTED = 0.28, "#222222", "#777777"  # opacity of the unsmoothed line; colours
MAX_SMOOTHING = 300  # points


class LogError(Exception):
    """A log that cannot be plotted; the message says which and why."""


@dataclass
class Run:
    name: str
    steps: dict = field(default_factory=dict)  # step -> its record; a resumed run repeats some, the last stands
    evals: dict = field(default_factory=dict)
    samples: dict = field(default_factory=dict)  # (step, number of the prompt) -> its record
    head: dict = field(default_factory=dict)  # the last run record: model, device, config
    end: dict = field(default_factory=dict)  # the last end record; empty while the run goes on

    def series(self, event, x, y):
        """Two lists, of the records that have both; a loss that is not finite is a gap (null in JSON)."""
        records = (self.steps if event == "step" else self.evals).values()
        points = [(r[x], math.nan if r[y] is None else r[y]) for r in records if x in r and y in r]
        return [list(column) for column in zip(*sorted(points))] or [[], []]


def log_of(path):
    return path / "log.jsonl" if path.is_dir() else path


def read_records(log):
    """Each line's object, without an unfinished last one."""
    lines = log.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line) if line.strip() else {}
        except ValueError as error:
            if number == len(lines):  # the run is still writing it, or was killed
                break
            raise LogError(f"{log}:{number}: not JSON: {error}") from None
        if isinstance(record, dict):
            yield record


def read_run(path):
    log = log_of(path)
    run = Run(log.parent.name if log.name == "log.jsonl" else log.stem)
    for record in read_records(log):
        event = record.get("event")
        if event == "run":
            run.name, run.head, run.end = record.get("name", run.name), record, {}
        elif event == "step" and "step" in record:
            run.steps[record["step"]] = record
        elif event == "eval" and "step" in record:
            run.evals[record["step"]] = record
        elif event == "sample" and "step" in record and "prompt" in record:
            run.samples[record["step"], record["prompt"]] = record
        elif event == "end":
            run.end = record
    if not run.steps and not run.evals:
        raise LogError(f"{log}: no step or eval record yet")
    return run


def read_runs(paths):
    """Runs with names that tell them apart: those of a comparison are all called seed-1 and so on."""
    runs = [read_run(path) for path in paths]
    for name_of in (lambda run, folder: f"{folder.resolve().parent.name}/{run.name}", lambda run, folder: str(folder)):
        names = [run.name for run in runs]
        for run, path in zip(runs, paths):
            if names.count(run.name) > 1:
                run.name = name_of(run, path if path.is_dir() else path.parent)
    return runs


def smooth(values, width):
    """Centred Gaussian mean with standard deviation `width` in points: no lag; gaps stay gaps."""
    import numpy as np

    values = np.array(values, float)
    known = np.isfinite(values)
    reach = math.ceil(3 * width)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / max(width, 1e-9)) ** 2)

    def blur(row):
        return np.convolve(row, kernel)[reach : reach + row.size]

    return np.where(known, blur(np.where(known, values, 0)) / np.maximum(blur(known.astype(float)), 1e-9), np.nan)


def parse_reference(text):
    label, _, value = text.rpartition("=")
    try:
        return label, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}', expected LABEL=NUMBER") from None


def label_references(axes, references):
    for label, value in references:
        axes.axhline(value, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        axes.annotate(
            f"{label} {value:g}", (1, value), xycoords=("axes fraction", "data"), xytext=(-4, 3),
            textcoords="offset points", ha="right", va="bottom", fontsize=9, color=MUTED,
        )


def draw(runs, references, x_axis):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (loss, rate) = plt.subplots(
        2, 1, sharex=True, figsize=(8, 5.6), height_ratios=(4, 1), layout="constrained"
    )
    palette = matplotlib.colormaps["tab10"].colors
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
            eval_xs, eval_losses, color=INK if alone else color, linestyle="none",
            marker="o", markersize=5, markeredgecolor="white", markeredgewidth=0.8, zorder=3,
            label=last if alone else f"{run.name}: {last}",
        )
        rate.plot(*run.series("step", x_axis, "lr"), color=color, linewidth=1.3)

    label_references(loss, references)
    loss.set_title(", ".join(run.name for run in runs) if len(runs) <= 3 else f"{len(runs)} runs", loc="left")
    loss.set_ylabel("loss (nats per token)")
    rate.set_ylabel("learning rate")
    rate.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    rate.set_ylim(bottom=0)
    rate.set_xlabel("training tokens" if x_axis == "tokens" else "step")
    rate.xaxis.set_major_formatter(EngFormatter(sep=""))
    for axes in (loss, rate):
        axes.margins(x=0.01)
        axes.grid(color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
    loss.legend(frameon=False, loc="upper right", ncols=1 + (len(runs) > 4))
    return figure


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, or its log.jsonl")
    parser.add_argument("-o", "--out", type=Path, default=Path("loss.png"), help="picture (default: loss.png)")
    parser.add_argument(
        "--reference", type=parse_reference, action="append", default=[], metavar="LABEL=LOSS",
        help='a horizontal line, such as "unigram entropy=6.44"; may be repeated',
    )
    parser.add_argument("--x", choices=("tokens", "step"), default="tokens", help="horizontal axis")
    options = parser.parse_args(arguments)
    try:
        figure = draw(read_runs(options.runs), options.reference, options.x)
        partial = options.out.with_name(f".partial-{options.out.name}")
        figure.savefig(partial, dpi=150)
        partial.replace(options.out)
    except ImportError as error:
        advice = "scripts/setup.sh python makes .venv with it"
        print(f"plot.py: {error.name} is not installed here; {advice}", file=sys.stderr)
        return 3
    except (LogError, OSError) as error:
        print(f"plot.py: {error}", file=sys.stderr)
        return 3
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
