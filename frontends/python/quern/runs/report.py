"""A page on one or more training runs, from their logs: figures, differences of config, curves with values on hover.

    quern-tools report runs/bf16 runs/e4m3 -o report.html

One HTML file that needs nothing else: no network, no script but its own. A run is its folder (with a log.jsonl) or
the log itself; a log still being written is fine. Losses are also drawn as differences from the first run; runs that
differ from it only in train.seed give the band of seeds. Uses the standard library only; samples are shown as text where
the tokenizers library and the run's checkpoint.tokenizer are at hand, as token numbers elsewhere.
"""

import base64
import hashlib
import json
import math
import re
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from quern.base.arguments import path_argument
from quern.base.fault import Fault
from quern.base.figures import three_digits
from quern.base.files import write_file
from quern.runs.run_log import Run, drawable, read_runs

Curve = tuple[list[int], list[float]]  # steps and values; a value that is not finite is a gap
Named = tuple[str, str, Curve]  # a curve behind its name and color
Limits = tuple[float, float]

COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")
BAND = "#d0d0d0"
POINTS = 800  # of a curve: about a pixel each
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 260, 76, 24, 10, 34  # of a chart, in pixels
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # what HTML has no place for
CHARTS = (  # title, event, key, digits of a value
    ("Training loss (nats per token)", "step", "loss", 4),
    ("Validation loss (nats per token)", "eval", "loss", 4),
    ("Gradient norm", "step", "grad_norm", 3),
    ("Learning rate", "step", "lr", 7),
    ("Tokens per second", "step", "tokens_per_second", 0),
)

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 900px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
h1, th, td, summary, .tip { overflow-wrap: anywhere }
table { font-size: .85rem; border-collapse: collapse; width: 100% }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #e6e6e6; text-align: left; vertical-align: top }
td.text { white-space: pre-wrap }
.runs tr { display: grid; grid-template: 1fr / 13rem repeat(auto-fit, minmax(6.5rem, 1fr)); border-bottom: 1px solid #e6e6e6 }
.runs :is(th, td) { border: solid var(--color); border-width: 0 0 0 3px; padding: .25rem .4rem; font-variant-numeric: tabular-nums }
.runs :is(th, td):first-child { border: 0; grid-row: 1 / span 100 }
code, pre { font-size: .8rem } pre { overflow-x: auto; background: #f6f6f6; padding: .7rem }
details, p { margin: .5rem 0 }
svg { width: 100%; height: auto; display: block } svg text { font: 11px system-ui, sans-serif; fill: #666 }
@media (max-width: 600px) {
  svg text { font-size: 20px }
  .runs tr { grid-template: auto / repeat(auto-fit, minmax(6.5rem, 1fr)) }
  .runs :is(th, td):first-child { grid-area: 1 / 1 / 2 / -1; color: #666 }
}
.chart { position: relative }
.tip { position: absolute; top: 0; pointer-events: none; background: #fffffff0; border: 1px solid #ccc;
  padding: .2rem .5rem; font-size: .8rem; max-width: 45%; display: none }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em; background: var(--color) }
.cursor { display: none }
""" + "".join(f".color{index} {{ --color: {color} }}\n" for index, color in enumerate(COLORS))

SCRIPT = """
for (const chart of document.querySelectorAll('.chart')) {
  const data = JSON.parse(chart.dataset.curves);
  const svg = chart.querySelector('svg'), tip = chart.querySelector('.tip'), line = svg.querySelector('.cursor');
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] < x) low = middle; else high = middle; }
    return x - xs[low] < xs[high] - x ? low : high;
  };
  chart.addEventListener('mousemove', event => {
    const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * data.width;
    const share = (at - data.left) / (data.width - data.left - data.right);
    tip.style.display = line.style.display = share < 0 || share > 1 ? 'none' : 'block';
    const x = data.low + share * (data.high - data.low);
    tip.replaceChildren();
    let shown = null;
    for (const run of data.runs) {
      if (!run.x.length) continue;
      const i = nearest(run.x, x);
      shown = shown ?? run.x[i];
      const row = document.createElement('div'), key = document.createElement('span');
      key.className = 'key'; key.style.setProperty('--color', run.color);
      row.append(key, `${run.name}: ${run.y[i] === null ? 'not finite' : run.y[i].toFixed(data.digits)}`);
      tip.append(row);
    }
    tip.prepend(`step ${shown}`);
    line.setAttribute('x1', at); line.setAttribute('x2', at);
    const right = share > 0.5;
    tip.style.left = right ? 'auto' : `${event.clientX - box.left + 14}px`;
    tip.style.right = right ? `${box.right - event.clientX + 14}px` : 'auto';
  });
  chart.addEventListener('mouseleave', () => { tip.style.display = line.style.display = 'none'; });
}
"""


def element(tag: str, *content: str | Element, **attributes: object) -> Element:
    """A tag around texts and other elements. Nothing else makes markup, and ElementTree escapes all texts."""
    named = {key.rstrip("_").replace("_", "-"): str(value) for key, value in attributes.items()}
    made = ElementTree.Element(tag, named)
    for part in content:
        if not isinstance(part, str):
            made.append(part)
        elif len(made):
            made[-1].tail = (made[-1].tail or "") + CONTROL.sub("\ufffd", part)
        else:
            made.text = (made.text or "") + CONTROL.sub("\ufffd", part)
    return made


def policy() -> str:
    """A content security policy for the page's own style and script, and nothing else."""
    style, code = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (STYLE, SCRIPT))
    own = f"style-src 'sha256-{style}'; script-src 'sha256-{code}'"
    return f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'"


def thinned(xs: Sequence[int], ys: Sequence[float], window: int = 1) -> Curve:
    """At most POINTS points: each the mean of `window` values up to it, or of all since the point before if these are
    more. Without the first points, whose windows are not full; gaps stay gaps."""
    size = math.ceil(len(xs) / POINTS) or 1
    ends = [end for end in range(len(xs), 0, -size) if end >= window][::-1]

    def mean(values: Sequence[float]) -> float:
        finite = [y for y in values if math.isfinite(y)]
        return statistics.fmean(finite) if finite else math.nan

    means = [(mean(ys[max(end - size, 0) : end]), mean(ys[max(end - max(size, window), 0) : end])) for end in ends]
    return [xs[end - 1] for end in ends], [math.nan if math.isnan(newest) else y for newest, y in means]


def ticks(low: float, high: float, count: int = 8) -> list[float]:
    """Round numbers from low to high, about `count` of them."""
    raw = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= raw * 0.999)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """12000 as 12k, 3e-04 as it is."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:.6g}"


def limits(values: Sequence[float]) -> Limits:
    """A little more than the range of the values; some range where they are all the same."""
    low, high = min(values), max(values)
    size = max(abs(low), abs(high))
    margin = max((high - low) * 0.04, size * 1e-9) if high - low > size * 1e-12 else size * 0.1
    margin = margin or 1.0
    return low - margin, high + margin


def svg_chart(curves: Sequence[Named], band: Curve, x_limits: Limits, y_limits: Limits) -> Element:
    """Values that are not finite are gaps. `band`: half the height of the shaded band around 0."""
    (x_low, x_high), (y_low, y_high) = x_limits, y_limits

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        return across, TOP + (y_high - y) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    known = [(x, y) for x, y in zip(*band) if math.isfinite(y)]
    outline = [place(x, y) for x, y in known] + [place(x, -y) for x, y in reversed(known)]
    parts = [element("polygon", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in outline), fill=BAND)] if known else []
    for y in ticks(y_low, y_high):
        _, at = place(x_low, y)
        parts.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=f"{at:.1f}", y2=f"{at:.1f}", stroke="#e6e6e6"))
        parts.append(element("text", short(y), x=LEFT - 6, y=f"{at:.1f}", dy=".35em", text_anchor="end"))
    for x in ticks(x_low, x_high):
        at, _ = place(x, y_low)
        if x == int(x) and at >= LEFT + 12:  # no half steps; room for the word at the left
            parts.append(element("text", short(x), x=f"{at:.1f}", y=HEIGHT - 8, text_anchor="middle"))
    parts.append(element("text", "step", x=LEFT - 6, y=HEIGHT - 8, text_anchor="end"))
    for _, color, (xs, ys) in curves:
        path, pen = [], "M"
        for x, y in zip(xs, ys):
            if math.isfinite(y):
                across, down = place(x, y)
                path.append(f"{pen}{across:.1f} {down:.1f}")
                pen = "L"
            else:
                pen = "M"
        parts.append(element("path", d="".join(path), fill="none", stroke=color, stroke_width=1.4))
        if len(xs) <= 40:
            dots = (place(x, y) for x, y in zip(xs, ys) if math.isfinite(y))
            parts += [element("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=2.5, fill=color) for x, y in dots]
    parts.append(element("line", class_="cursor", y1=TOP, y2=HEIGHT - BOTTOM, stroke="#999"))
    return element("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img")


def chart(title: str, digits: int, curves: Sequence[Named], band: Named | None = None, note: str = "") -> list[Element]:
    """A heading and a chart, or nothing where no curve has a value. With a `band` it has 0 too."""
    finite = [y for _, _, (_, ys) in curves for y in ys if math.isfinite(y)]
    if not finite:
        return []
    shown = [*curves, *([band] if band else [])]
    steps = [x for _, _, (xs, _) in shown for x in xs]
    x_limits = (min(steps), max(steps)) if min(steps) < max(steps) else (min(steps) - 1, max(steps) + 1)
    reach = [y for y in band[2][1] if math.isfinite(y)] + [0] if band else []
    data = {
        "width": WIDTH, "left": LEFT, "right": RIGHT, "low": x_limits[0], "high": x_limits[1], "digits": digits,
        "runs": [
            {"name": name, "color": color, "x": xs, "y": [y if math.isfinite(y) else None for y in ys]}
            for name, color, (xs, ys) in shown
        ],
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    y_limits = limits([*finite, *reach, *(-y for y in reach)])
    drawn = svg_chart(curves, band[2] if band else ([], []), x_limits, y_limits)
    parts = [element("h2", title), element("div", drawn, element("div", class_="tip"), class_="chart", data_curves=text)]
    return [parts[0], element("p", note), parts[1]] if note else parts


def seeds_of_first(runs: Sequence[Run]) -> tuple[list[str], dict[str, int]]:
    """(seed of each run, {seed: index} of the first run and of those that differ from it in nothing else)."""
    seeds: list[str] = []
    repeats: dict[str, int] = {}
    first: object = None
    for index, run in enumerate(runs):
        config = flat(run.config())
        seeds.append(str(config.pop("train.seed", "")))
        rest = {key: value for key, value in config.items() if not key.startswith(("log.", "checkpoint."))}
        setting = (rest, run.head.get("quern"), run.head.get("device"))
        if index == 0 or setting == first:
            first = setting
            repeats.setdefault(seeds[-1], index)
    return seeds, repeats


def difference_chart(runs: Sequence[Run], colors: Sequence[str]) -> list[Element]:
    """Losses minus the first run's, or its repeat's with the same seed. Means over a tenth of the steps, so that
    the last point is the difference, and the last of the band the "seed to seed", of `quern ab`."""
    seeds, repeats = seeds_of_first(runs)
    losses = [dict(zip(*run.series("step", "step", "loss"))) for run in runs]

    def means(indices: Collection[int], value: Callable[[int], float]) -> Curve:
        """Of the steps that these runs all have."""
        steps = [step for step in losses[min(indices)] if all(step in losses[index] for index in indices)]
        return thinned(steps, [value(step) for step in steps], max(1, len(steps) // 10))

    curves: list[Named] = []
    for index, run in enumerate(runs):
        pair = repeats.get(seeds[index], 0)
        if pair == index:  # part of the band; where there is nothing else, a curve too
            pair = 0
        if index != pair and (index not in repeats.values() or len(repeats) == len(runs)):
            curve = means({index, pair}, lambda step: losses[index][step] - losses[pair][step])
            curves.append((run.name, colors[index], curve))

    columns = [means(repeats.values(), losses[index].__getitem__) for index in repeats.values()]
    spread = [
        statistics.stdev(ys) if len(ys) > 1 and all(map(math.isfinite, ys)) else math.nan
        for ys in zip(*(ys for _, ys in columns))
    ]
    first = runs[0].name
    note = f"Means over a tenth of the steps, up to each point, minus {first}'s"
    if len(repeats) > 1:
        note += f" or its repeat with the same seed. Band: ± one standard deviation over the {len(repeats)} seeds of {first}."
    else:
        note += ". No other run differs from it in train.seed alone: there is no band of seeds to judge differences by."
    if len({run.head.get("tokens_per_step") for run in runs}) > 1:
        note += " The runs differ in tokens a step: the same step is not the same data."
    band = (f"± over {len(repeats)} seeds", BAND, (columns[0][0], spread)) if len(repeats) > 1 else ("", BAND, ([], []))
    return chart("Difference of training loss from the first run", 5, curves, band, note)


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"train.steps": 8, ...}"""
    result: dict[str, Any] = {}
    for key, value in table.items():
        result |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return result


def config_differences(runs: Sequence[Run]) -> list[tuple[str, list[Any]]]:
    """[(key, [value of each run, None where it has none])] of the keys that are not the same in all."""
    configs = [flat(run.config()) for run in runs]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    rows = [(key, [config.get(key) for config in configs]) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]


def number(value: float | None, digits: int) -> str:
    value = drawable(value)
    return "-" if math.isnan(value) else f"{value:,.{digits}f}"


def size(count: float) -> str:
    """"529 KiB", "79.1 GiB"."""
    unit = "GiB"
    for smaller in ("B", "KiB", "MiB"):
        if count < 1024:
            unit = smaller
            break
        count /= 1024
    return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"


def figures(run: Run) -> list[tuple[str, str]]:
    """[(label, text)] of the table of figures."""
    steps, losses = run.series("step", "step", "loss")
    _, evals = run.series("eval", "step", "loss")
    _, speeds = run.series("step", "step", "tokens_per_second")
    last = [loss for loss in losses[-max(1, len(losses) // 10) :] if math.isfinite(loss)]
    speeds = [speed for speed in speeds[1:] or speeds if math.isfinite(speed)]
    total = run.head.get("steps", 0)
    times = [record["time"] for record in run.steps.values() if "time" in record]
    memory = run.head.get("device_bytes")
    state = "ended" if run.end else "not ended"
    return [
        ("model", run.head.get("model", "-")),
        ("parameters", number(run.head.get("parameters"), 0)),
        ("device", run.head.get("device", "-")),
        ("precision", run.head.get("precision", "-")),
        ("steps", f"{steps[-1] if steps else 0:,} of {total:,}, {state}"),
        ("tokens", number(run.steps[steps[-1]].get("tokens") if steps else None, 0)),
        ("training loss, last tenth of steps", number(statistics.fmean(last) if last else None, 4)),
        ("validation loss, last", number(evals[-1] if evals else None, 4)),
        ("validation loss, lowest", number(min((v for v in evals if math.isfinite(v)), default=None), 4)),
        ("tokens per second, median", three_digits(statistics.median(speeds)) if speeds else "-"),
        ("seconds, of the last start", number(times[-1] if times else None, 1)),
        ("device memory", size(memory) if memory else "-"),
        ("quern", run.head.get("quern", "-")),
    ]


def table(head: Sequence[str], rows: Sequence[Sequence[str]], shades: Sequence[int]) -> Element:
    """A row's label, and a cell for each run, with its color."""

    def line(tag: str, first: str, *cells: str) -> Element:
        colored = (element(tag, cell, class_=f"color{shade}") for cell, shade in zip(cells, shades))
        return element("tr", element(tag, first), *colored)

    return element("table", line("th", *head), *(line("td", *row) for row in rows), class_="runs")


def decoder_of(run: Run) -> Callable[[str], str]:
    """Turns "1,2,3" into text, where the run's tokenizer can be had."""
    folder = flat(run.config()).get("checkpoint.tokenizer")
    if not folder or not isinstance(folder, str):
        return lambda tokens: tokens
    try:
        from quern.tokens.encoding import load_tokenizer, tokenizing

        tokenizer = load_tokenizer(Path(folder) / "tokenizer.json")
    except (ImportError, Fault):
        return lambda tokens: tokens

    def decode(tokens: str) -> str:
        with tokenizing(folder):
            text: str = tokenizer.decode([int(token) for token in tokens.split(",") if token])
        return text

    return decode


def samples(run: Run, name: Sequence[str | Element]) -> Element:
    """A table of a run's samples, oldest first; the prompts are in bold."""
    decode = decoder_of(run)
    rows = []
    for (step, _), record in sorted(run.samples.items()):
        prompt, drawn = record.get("prompt_tokens", ""), record.get("tokens", "")
        start = decode(prompt)
        whole = decode(",".join(part for part in (prompt, drawn) if part))
        # Decoded together, so that a character of which the prompt has a part is whole.
        rest = whole[len(start) :] if whole.startswith(start) else " " + decode(drawn)
        text = element("td", element("b", start), rest, class_="text")
        rows.append(element("tr", element("td", str(step)), text))
    head = element("tr", element("th", "step"), element("th", "text"))
    return element("details", element("summary", "samples of ", *name), element("table", head, *rows))


def body(runs: Sequence[Run]) -> Element:
    shades = [index % len(COLORS) for index in range(len(runs))]
    colors = [COLORS[shade] for shade in shades]

    def name(index: int) -> tuple[Element, str]:
        return element("span", class_=f"key color{shades[index]}"), runs[index].name

    names = [run.name for run in runs]
    columns = [figures(run) for run in runs]
    rows: list[tuple[str, ...]] = [(label, *(column[i][1] for column in columns)) for i, (label, _) in enumerate(columns[0])]
    parts = [element("h1", title_of(runs)), table(["", *names], rows, shades)]
    if len(runs) > 1:
        rows = [
            (key, *("-" if value is None else json.dumps(value, default=str) for value in values))
            for key, values in config_differences(runs)
        ]
        parts.append(element("h2", "Differences of config"))
        parts.append(table(["key", *names], rows, shades) if rows else element("p", "None."))
    for title, event, key, digits in CHARTS:
        series = [run.series(event, "step", key) for run in runs]
        parts += chart(title, digits, [(r.name, c, thinned(*xy)) for r, c, xy in zip(runs, colors, series)])
        if (event, key) == ("step", "loss"):
            parts += difference_chart(runs, colors)
    parts += [samples(run, name(index)) for index, run in enumerate(runs) if run.samples]
    for index, run in enumerate(runs):
        config = element("pre", run.head.get("config", "not logged"))
        parts.append(element("details", element("summary", "config of ", *name(index)), config))
    return element("body", *parts, element("script", SCRIPT))


def title_of(runs: Sequence[Run]) -> str:
    return ", ".join(run.name for run in runs) if len(runs) <= 3 else f"{len(runs)} runs"


def page(runs: Sequence[Run]) -> str:
    head = element(
        "head", element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy()),
        element("title", title_of(runs)), element("meta", name="viewport", content="width=device-width"),
        element("style", STYLE),
    )
    whole = element("html", head, body(runs), lang="en")
    return f"<!doctype html>{ElementTree.tostring(whole, encoding='unicode', method='html')}\n"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=path_argument, metavar="RUN", help="a run's folder, or its log.jsonl")
    parser.add_argument(
        "-o", "--out", type=path_argument, default=Path("report.html"), help="page (default: report.html)"
    )


def main(options: Namespace) -> None:
    write_file(options.out, page(read_runs(options.runs)).encode("utf-8", "replace"))
    print(options.out)
