"""Plots a comparison made by `quern ab`: losses, their differences from the first arm, and speed.

    quern-tools plot ab runs/ab-demo              # writes runs/ab-demo/comparison.png

Lines are means over seeds, bands reach from the least to the most of them. Failed runs are left out.
"""

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from quern.plots import picture
from quern.plots.loss import MAX_SMOOTHING, smooth
from quern.runs.ab_report import read_report
from quern.base.arguments import path_argument
from quern.base.fault import Fault
from quern.base.json_shape import INTEGER, NUMBER, TEXT, Shape
from quern.runs.run_log import Run, drawable, read_run

Arm = dict[str, Any]  # one arm of report.json
Runs = list[tuple[int, Run]]  # of an arm, with their seeds
Curve = dict[int, float]  # step -> value

ARM: Shape = {
    "name": TEXT,
    "overrides?": [TEXT],
    "runs": [{"seed": INTEGER, "directory": TEXT, "exit_code": INTEGER}],
    "tokens_per_second": NUMBER,
    "tokens_per_second_interval": [NUMBER],
    "training_loss": {"deviation": NUMBER},
}
LABEL_CHARACTERS, LABEL_LINES = 32, 8
MOST_ARMS = 32  # that one picture shows


def read_comparison(folder: Path) -> tuple[dict[str, Any], list[tuple[Arm, Runs]]]:
    """(report.json, [(arm of it, [(seed, run)])]), only runs that ended well."""
    report = read_report(folder, ARM)
    if len(report["arms"]) > MOST_ARMS:
        raise Fault(folder, "too many arms for a picture", len(report["arms"]), f"at most {MOST_ARMS}")
    arms: list[tuple[Arm, Runs]] = []
    for arm in report["arms"]:
        interval = arm["tokens_per_second_interval"]
        if len(interval) != 2:
            raise Fault(folder / "report.json", "tokens_per_second_interval", f"{len(interval)} numbers", "two")
        # The comparison's present place: report.json has the place where it was made.
        paths = [(run["seed"], Path(run["directory"])) for run in arm["runs"] if run["exit_code"] == 0]
        arms.append((arm, [(seed, read_run(folder / path.parent.name / path.name)) for seed, path in paths]))
    return report, arms


def label_of(arm: Arm) -> str:
    """A line for each key that the arm sets; of a long key its last part, or names would leave no room for the axes."""
    lines = arm.get("overrides") or [arm["name"]]
    lines = lines[:LABEL_LINES] + ["..."] * (len(lines) > LABEL_LINES)
    return "\n".join(picture.label(line if len(line) <= LABEL_CHARACTERS else shorten(line)) for line in lines)


def shorten(assignment: str) -> str:
    key, equals, value = assignment.partition("=")
    return key.rpartition(".")[2] + equals + value


def losses(run: Run) -> Curve:
    steps, values = run.series("step", "step", "loss")
    return dict(zip(steps, smooth(values, min(len(steps) / 100, MAX_SMOOTHING)) if steps else []))


def draw_band(axes: Axes, curves: Sequence[Curve], color: Any, label: str) -> None:
    """`curves`: a dict step -> value for each seed; only steps that all have."""
    steps = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    if not steps:
        return
    columns = [[curve[step] for curve in curves] for step in steps]
    axes.plot(steps, [sum(column) / len(column) for column in columns], color=color, linewidth=1.4, label=label)
    axes.fill_between(steps, [min(c) for c in columns], [max(c) for c in columns], color=color, alpha=0.18, linewidth=0)


def draw_speeds(axes: Axes, arms: Sequence[tuple[Arm, Runs]], palette: Sequence[Any]) -> None:
    for index, (arm, _) in enumerate(arms):
        speed = drawable(arm["tokens_per_second"])
        if math.isnan(speed):
            continue
        low, high = (drawable(bound) for bound in arm["tokens_per_second_interval"])
        axes.barh(index, speed, color=palette[index % len(palette)], height=0.6)
        axes.errorbar(speed, index, xerr=[[max(speed - low, 0)], [max(high - speed, 0)]], color="#222222", capsize=3)
        axes.annotate(f" {speed:,.0f}", (max(high, speed), index), va="center", fontsize=9)
    axes.set_yticks(range(len(arms)), [label_of(arm) for arm, _ in arms])
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second, with the 95% interval of the median")
    axes.margins(x=0.12)


def draw(report: dict[str, Any], arms: Sequence[tuple[Arm, Runs]]) -> Figure:
    plt = picture.pyplot()
    figure: Figure
    height = sum(0.2 + 0.2 * (1 + label_of(arm).count("\n")) for arm, _ in arms)
    figure, (loss, difference, speed) = plt.subplots(
        3, 1, figsize=(8, 7.5 + height), height_ratios=(4, 3, 0.6 + height), layout="constrained"
    )
    palette = plt.get_cmap("tab10").colors
    curves = [{seed: losses(run) for seed, run in runs} for _, runs in arms]
    for index, (arm, runs) in enumerate(arms):
        color = palette[index % len(palette)]
        draw_band(loss, list(curves[index].values()), color, label_of(arm))
        if index == 0:
            continue
        # report.json lists each arm's repeats in one order; seeds differ where train.seed itself is varied.
        pairs = zip((r["seed"] for r in arms[0][0]["runs"]), (r["seed"] for r in arm["runs"]))
        both = [(curves[0][a], curves[index][b]) for a, b in pairs if a in curves[0] and b in curves[index]]
        draw_band(difference, [{s: b[s] - a[s] for s in a if s in b} for a, b in both], color, label_of(arm))
    title = f"{report['config']}, {report['repeats']} seed{'s' * (report['repeats'] != 1)}"
    loss.set_title(picture.label(title), loc="left")
    loss.set_ylabel("loss (nats per token)")
    if loss.lines:
        loss.legend(frameon=False, loc="upper right")
    difference.axhline(0, color=picture.MUTED, linewidth=1)
    spread = drawable(arms[0][0]["training_loss"]["deviation"])
    if not math.isnan(spread):
        difference.axhspan(-spread, spread, color=picture.MUTED, alpha=0.15, linewidth=0)
        difference.annotate(
            "± deviation over seeds of the first arm", (0, spread), xycoords=("axes fraction", "data"),
            xytext=(4, 2), textcoords="offset points", fontsize=8, color=picture.MUTED,
        )
    difference.set_ylabel("difference of loss\nfrom the first arm")
    difference.set_xlabel("step")
    for axes in (loss, difference):
        picture.add_grid(axes)
    draw_speeds(speed, arms, palette)
    return figure


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("comparison", type=path_argument, metavar="DIR", help="what `quern ab` wrote: its --out")
    parser.add_argument("-o", "--out", type=path_argument, help="picture (default: DIR/comparison.png)")


def main(options: Namespace) -> None:
    out = options.out or options.comparison / "comparison.png"
    picture.save(draw(*read_comparison(options.comparison)), out)
    print(out)
