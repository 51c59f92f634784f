#!/usr/bin/env python3
"""A page on one or more training runs, from their logs: figures, differences of config, curves with values on hover.

    scripts/report.py runs/bf16 runs/e4m3 -o report.html

One HTML file that needs nothing else: no network, no script but its own. A run is its folder (with a log.jsonl) or
the log itself; a log still being written is fine. Uses the standard library only; samples are shown as text where the
tokenizers library and the run's checkpoint.tokenizer are at hand, as token numbers elsewhere.
"""

import argparse
import html
import json
import math
import statistics
import sys
import tomllib
from pathlib import Path

import plot

COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")
POINTS = 800  # of a curve: about a pixel each
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 260, 64, 12, 10, 26  # of a chart, in pixels
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
table { border-collapse: collapse; font-size: .85rem; display: block; overflow-x: auto }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #e6e6e6; text-align: left; white-space: nowrap }
td.text { white-space: pre-wrap }
td.number { text-align: right; font-variant-numeric: tabular-nums }
code, pre { font-size: .8rem } pre { overflow-x: auto; background: #f6f6f6; padding: .7rem }
svg { width: 100%; height: auto; display: block } svg text { font: 11px system-ui, sans-serif; fill: #666 }
.chart { position: relative }
.tip { position: absolute; top: 0; pointer-events: none; background: #fffffff0; border: 1px solid #ccc;
  padding: .2rem .5rem; font-size: .8rem; white-space: nowrap; display: none }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em }
"""

SCRIPT = """
for (const chart of document.querySelectorAll('.chart')) {
  const data = JSON.parse(chart.querySelector('script').textContent);
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
      key.className = 'key'; key.style.background = run.color;
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


def thinned(xs, ys):
    """At most POINTS points, each the mean of its neighbours, at the last one's place; gaps stay gaps."""
    size = math.ceil(len(xs) / POINTS) or 1
    if size == 1:
        return xs, ys
    kept_xs, kept_ys = [], []
    for begin in range(0, len(xs), size):
        finite = [y for y in ys[begin : begin + size] if math.isfinite(y)]
        kept_xs.append(xs[min(begin + size, len(xs)) - 1])
        kept_ys.append(statistics.fmean(finite) if finite else math.nan)
    return kept_xs, kept_ys


def ticks(low, high, count=8):
    """Round numbers from low to high, about `count` of them."""
    raw = (high - low) / count
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= raw * 0.999)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def short(value):
    """12000 as 12k, 3e-04 as it is."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:.6g}"


def limits(values):
    low, high = min(values), max(values)
    margin = (high - low) * 0.04 or abs(high) * 0.1 or 1
    return low - margin, high + margin


def svg_chart(series, colors, x_limits, y_limits):
    """`series`: [(xs, ys)]; values that are not finite are gaps."""
    (x_low, x_high), (y_low, y_high) = x_limits, y_limits

    def place(x, y):
        across = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        return across, TOP + (y_high - y) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for y in ticks(y_low, y_high):
        _, at = place(x_low, y)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e6e6e6"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{short(y)}</text>')
    for x in ticks(x_low, x_high):
        at, _ = place(x, y_low)
        if x != int(x) or at < LEFT + 12:  # no half steps; room for the word at the left
            continue
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{short(x)}</text>')
    parts.append(f'<text x="{LEFT - 6}" y="{HEIGHT - 8}" text-anchor="end">step</text>')
    for (xs, ys), color in zip(series, colors):
        path, pen = [], "M"
        for x, y in zip(xs, ys):
            if math.isfinite(y):
                across, down = place(x, y)
                path.append(f"{pen}{across:.1f} {down:.1f}")
                pen = "L"
            else:
                pen = "M"
        parts.append(f'<path d="{"".join(path)}" fill="none" stroke="{color}" stroke-width="1.4"/>')
        if len(xs) <= 40:
            dots = (place(x, y) for x, y in zip(xs, ys) if math.isfinite(y))
            parts += [f'<circle cx="{across:.1f}" cy="{down:.1f}" r="2.5" fill="{color}"/>' for across, down in dots]
    parts.append(f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#999" style="display:none"/></svg>')
    return "".join(parts)


def chart(title, event, key, digits, runs, colors):
    series = [thinned(*run.series(event, "step", key)) for run in runs]
    finite = [y for _, ys in series for y in ys if math.isfinite(y)]
    if not finite:
        return ""
    steps = [x for xs, _ in series for x in xs]
    x_limits = (min(steps), max(steps)) if min(steps) < max(steps) else (min(steps) - 1, max(steps) + 1)
    data = {
        "width": WIDTH, "left": LEFT, "right": RIGHT, "low": x_limits[0], "high": x_limits[1], "digits": digits,
        "runs": [
            {"name": run.name, "color": color, "x": xs, "y": [y if math.isfinite(y) else None for y in ys]}
            for run, color, (xs, ys) in zip(runs, colors, series)
        ],
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")  # cannot end the script
    svg = svg_chart(series, colors, x_limits, limits(finite))
    return (
        f'<h2>{html.escape(title)}</h2><div class="chart">{svg}<div class="tip"></div>'
        f'<script type="application/json">{text}</script></div>'
    )


def flat(table, prefix=""):
    """{"train.steps": 8, ...}"""
    result = {}
    for key, value in table.items():
        result |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return result


def config_of(run):
    try:
        return flat(tomllib.loads(run.head.get("config", "")))
    except tomllib.TOMLDecodeError:
        return {}


def config_differences(runs):
    """[(key, [value of each run, None where it has none])] of the keys that are not the same in all."""
    configs = [config_of(run) for run in runs]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    rows = [(key, [config.get(key) for config in configs]) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]


def number(value, digits):
    return "-" if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def size(count):
    """"529 KiB", "79.1 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"
        count /= 1024


def figures(run):
    """[(label, text)] of the table of figures."""
    steps, losses = run.series("step", "step", "loss")
    _, evals = run.series("eval", "step", "loss")
    _, speeds = run.series("step", "step", "tokens_per_second")
    last = [loss for loss in losses[-max(1, len(losses) // 10) :] if math.isfinite(loss)]
    speeds = [speed for speed in speeds[1:] or speeds if math.isfinite(speed)]
    total = run.head.get("steps", 0)
    times = [record["time"] for record in run.steps.values() if isinstance(record.get("time"), (int, float))]
    memory = run.head.get("device_bytes")
    state = "ended" if run.end else "not ended"
    return [
        ("model", str(run.head.get("model", "-"))),
        ("parameters", number(run.head.get("parameters"), 0)),
        ("device", str(run.head.get("device", "-"))),
        ("precision", str(run.head.get("precision", "-"))),
        ("steps", f"{steps[-1] if steps else 0:,} of {total:,}, {state}"),
        ("tokens", number(run.steps[steps[-1]].get("tokens") if steps else None, 0)),
        ("training loss, last tenth of steps", number(statistics.fmean(last) if last else None, 4)),
        ("validation loss, last", number(evals[-1] if evals else None, 4)),
        ("validation loss, lowest", number(min((v for v in evals if math.isfinite(v)), default=None), 4)),
        ("tokens per second, median", number(statistics.median(speeds) if speeds else None, 0)),
        ("seconds, of the last start", number(times[-1] if times else None, 1)),
        ("device memory", size(memory) if memory else "-"),
        ("quern", str(run.head.get("quern", "-"))),
    ]


def table(head, rows):
    """Cells are texts; those after the first are numbers or short values."""
    lines = ["<table><tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>"]
    for first, *cells in rows:
        lines.append(
            f"<tr><td>{html.escape(first)}</td>"
            + "".join(f'<td class="number">{html.escape(cell)}</td>' for cell in cells) + "</tr>"
        )
    return "".join(lines) + "</table>"


def decoder_of(run):
    """Turns "1,2,3" into text, where the run's tokenizer can be had."""
    folder = config_of(run).get("checkpoint.tokenizer")
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json")) if folder else None
    except Exception:  # the library raises bare Exception
        tokenizer = None
    if tokenizer is None:
        return lambda tokens: tokens
    return lambda tokens: tokenizer.decode([int(token) for token in tokens.split(",") if token])


def samples(run, name):
    """A table of a run's samples, oldest first; the prompts are in bold."""
    if not run.samples:
        return ""
    decode = decoder_of(run)
    rows = []
    for (step, _), record in sorted(run.samples.items()):
        prompt, drawn = str(record.get("prompt_tokens", "")), str(record.get("tokens", ""))
        start = decode(prompt)
        whole = decode(",".join(part for part in (prompt, drawn) if part))
        # Decoded together, so that a character of which the prompt has a part is whole.
        rest = whole[len(start) :] if whole.startswith(start) else " " + decode(drawn)
        rows.append(f'<tr><td class="number">{step}</td><td class="text"><b>{html.escape(start)}</b>'
                    f"{html.escape(rest)}</td></tr>")
    return (f"<details><summary>samples of {name}</summary><table><tr><th>step</th><th>text</th></tr>"
            f"{''.join(rows)}</table></details>")


def page(runs):
    colors = [COLORS[index % len(COLORS)] for index in range(len(runs))]
    names = [
        f'<span class="key" style="background:{color}"></span>{html.escape(run.name)}'
        for run, color in zip(runs, colors)
    ]
    title = html.escape(", ".join(run.name for run in runs) if len(runs) <= 3 else f"{len(runs)} runs")
    columns = [figures(run) for run in runs]
    rows = [(label, *(column[i][1] for column in columns)) for i, (label, _) in enumerate(columns[0])]
    parts = [f"<h1>{title}</h1>", table(["", *names], rows)]
    if len(runs) > 1:
        rows = [
            (key, *("-" if value is None else json.dumps(value, default=str) for value in values))
            for key, values in config_differences(runs)
        ]
        parts.append("<h2>Differences of config</h2>")
        parts.append(table(["key", *names], rows) if rows else "<p>None.</p>")
    parts += [chart(*row, runs, colors) for row in CHARTS]
    parts += [samples(run, name) for run, name in zip(runs, names)]
    for run, name in zip(runs, names):
        config = html.escape(run.head.get("config", "not logged"))
        parts.append(f"<details><summary>config of {name}</summary><pre>{config}</pre></details>")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>'
        f"<body>{''.join(parts)}<script>{SCRIPT}</script></body></html>\n"
    )


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, or its log.jsonl")
    parser.add_argument("-o", "--out", type=Path, default=Path("report.html"), help="page (default: report.html)")
    options = parser.parse_args(arguments)
    try:
        text = page(plot.read_runs(options.runs))
        partial = options.out.with_name(f".partial-{options.out.name}")
        partial.write_text(text, encoding="utf-8")
        partial.replace(options.out)
    except (plot.LogError, OSError) as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 3
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
