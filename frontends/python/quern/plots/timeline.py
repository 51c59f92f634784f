"""Plots the timeline of a step, lane by lane, from a file of `quern plan --timeline` or `quern bench --timeline`.

    quern plan configs/demo.toml --timeline step.json
    quern-tools plot timeline step.json -o step.png

One panel for each run with a visible share of the step, all on one scale. The row under the kernels shows their waits, in
the colour of the owner that they wait for; its transfers have the same colour.
"""

import itertools
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from quern.base.arguments import path_argument
from quern.base.fault import Fault, reading
from quern.base.json_shape import COUNT, NUMBER, TEXT, Shape, checked, choice, parse
from quern.plots import picture

TIMELINE: Shape = {
    "otherData": {"made_by": choice("quern")},
    "traceEvents": [
        {
            "ph": choice("M", "X"), "name": TEXT, "tid?": COUNT, "args?": {"name?": TEXT}, "cat?": TEXT, "ts?": NUMBER,
            "dur?": NUMBER,
        }
    ],
}
SEEN = 0.01  # of the whole: a shorter run has no panel
MOST_PANELS = 16
WAIT, WAITS = "wait for ", "waits"
ROWS = ("compute", WAITS, "copy in", "copy out", "communication", "host")
WORK = {  # by how their ops begin
    "matmul": "#4c72b0", "attention": "#55a868", "adamw": "#8c6d5a", "other kernels": "#a9b8cf", "other copies": "#bbbbbb",
}
OWNERS = ("#c44e52", "#dd8452", "#8172b3", "#ccb974", "#64b5cd", "#da8bc3")


@dataclass(frozen=True)
class Bar:
    name: str
    run: str
    row: str  # of the picture: its lane, or "waits"
    begin: float  # milliseconds
    length: float


def read_timeline(path: Path) -> tuple[str, list[Bar]]:
    """Its title and its bars."""
    with reading(path):
        data = path.read_bytes()
    try:
        events = checked(parse(data, path), TIMELINE, path)["traceEvents"]
    except Fault as fault:
        raise Fault(fault, "", advice="not a timeline of quern") from None
    titles = [event.get("args", {}).get("name", "") for event in events if event["name"] == "process_name"]
    lanes = {event.get("tid"): event.get("args", {}).get("name") for event in events if event["name"] == "thread_name"}
    bars = []
    for number, event in enumerate(events):
        if event["ph"] != "X":
            continue
        begin, length, lane = event.get("ts"), event.get("dur"), lanes.get(event.get("tid"))
        if begin is None or length is None or lane is None or not 0 <= length < 1e15 or not 0 <= begin < 1e15:
            raise Fault(path, f"traceEvents[{number}]", event["name"], "a lane of the file, and when it runs")
        row = WAITS if event["name"].startswith(WAIT) else lane.replace("_", " ")
        if length > 0:
            bars.append(Bar(event["name"], event.get("cat", ""), row, begin / 1e3, length / 1e3))
    if not bars:
        raise Fault(path, "nothing in it takes time", advice="not a timeline of a step")
    return (titles or [""])[0], bars


def label_of(bar: Bar) -> str:
    """Whose the bytes are that it moves or waits for, or what kind of work it is."""
    for word in (WAIT, "fetch ", "release ", "gather ", "reduce "):
        if bar.name.startswith(word):
            return bar.name[len(word) :]
    if bar.row != ROWS[0]:
        return "other copies"
    return next((kind for kind in WORK if bar.name.startswith(kind)), "other kernels")


def runs_of(bars: Sequence[Bar]) -> list[tuple[str, list[Bar]]]:
    """Names and bars of the runs, one behind the other, that can be seen."""
    runs: list[tuple[str, list[Bar]]] = []
    for bar in bars:
        if not runs or runs[-1][0] != bar.run:
            runs.append((bar.run, []))
        runs[-1][1].append(bar)
    whole = span_of(bars)
    return [(name, of_run) for name, of_run in runs if span_of(of_run) >= SEEN * whole][:MOST_PANELS]


def span_of(bars: Sequence[Bar]) -> float:
    return max(bar.begin + bar.length for bar in bars) - min(bar.begin for bar in bars)


def draw_run(axes: Axes, name: str, bars: Sequence[Bar], rows: Sequence[str], colors: dict[str, str]) -> None:
    begin = min(bar.begin for bar in bars)
    spans: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for bar in bars:
        spans.setdefault((bar.row, colors[label_of(bar)]), []).append((bar.begin - begin, bar.length))
    for (row, color), of_color in spans.items():
        axes.broken_barh(of_color, (rows.index(row) - 0.4, 0.8), facecolors=color, linewidth=0)
    waits = sum(bar.length for bar in bars if bar.row == WAITS)
    text = f"{name}: {span_of(bars):,.0f} ms" + (f", kernels wait {waits:,.0f} ms" if waits else "")
    axes.set_title(picture.label(text), loc="left", fontsize=9)
    axes.set_yticks(range(len(rows)), [picture.label(row) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.margins(x=0)
    axes.grid(axis="x", color=picture.GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def draw(title: str, bars: Sequence[Bar]) -> Figure:
    plt = picture.pyplot(font_size=9)
    runs = runs_of(bars)
    seen = [bar for _, of_run in runs for bar in of_run]
    rows = sorted({bar.row for bar in seen}, key=lambda row: ROWS.index(row) if row in ROWS else len(ROWS))
    labels = {label_of(bar) for bar in seen}
    colors = {label: color for label, color in WORK.items() if label in labels}
    colors |= dict(zip(sorted(labels - set(WORK)), itertools.cycle(OWNERS)))
    figure: Figure
    height = 1.0 + len(runs) * (0.5 + 0.35 * len(rows))
    figure, grid = plt.subplots(len(runs), 1, sharex=True, squeeze=False, figsize=(12, height), layout="constrained")
    figure.suptitle(picture.label(title), x=0.01, ha="left")
    for (axes,), (name, of_run) in zip(grid, runs):
        draw_run(axes, name, of_run, rows, colors)
    grid[-1][0].set_xlabel("milliseconds from the run's start")
    handles = [Patch(color=color, label=picture.label(label)) for label, color in colors.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 9), frameon=False, fontsize=8)
    return figure


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("timeline", type=path_argument, metavar="FILE", help="what --timeline of quern wrote")
    parser.add_argument(
        "-o", "--out", type=path_argument, default=Path("timeline.png"), help="picture (default: timeline.png)"
    )


def main(options: Namespace) -> None:
    picture.save(draw(*read_timeline(options.timeline)), options.out)
    print(options.out)
