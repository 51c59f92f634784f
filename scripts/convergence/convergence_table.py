#!/usr/bin/env python3
"""Final validation losses of a `quern ab` comparison: differences from its first arm, in percent and seed deviations.

    scripts/convergence/convergence_table.py runs/convergence        # writes runs/convergence/convergence.md

The second arm is held to the project's bound: a mean paired difference under 0.5% and under twice the first arm's
deviation over seeds, in size. With --bands FILE each arm is held to its own band instead: the difference in percent, from
and to, of the last line whose pattern the arm's name matches. Exit code 1 says that an arm is outside, or has no band.

--best FILE writes the learning rates with the lowest losses, one of each optimizer, of the arms that ended well.
"""

import fnmatch
import math
import re
import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "frontends" / "python"))
from quern.base.arguments import parser_for, path_argument
from quern.base.end_of_main import script
from quern.base.fault import Fault, printable
from quern.base.files import write_file
from quern.base.json_shape import COUNT, NUMBER, TEXT
from quern.runs.ab_report import read_report

FIGURES = ("mean", "deviation", "difference", "difference_deviation")
ARM = {"name": TEXT, "good_runs": COUNT, "validation_loss": dict.fromkeys(FIGURES, NUMBER)}
LARGEST_PERCENT, LARGEST_DEVIATIONS = 0.5, 2.0
COLUMNS = ("arm", "runs", "validation loss", "difference", "percent", "in seed deviations")


def read_arms(folder):
    report = read_report(folder, ARM)
    path, arms, repeats = folder / "report.json", report["arms"], report["repeats"]
    if len(arms) < 2 or repeats < 2:
        found = f"{len(arms)} arms, {repeats} runs of each"
        raise Fault(path, "nothing to compare", found, "two of both", "compare with --vary and --repeat 3")
    for arm in arms:
        if arm["good_runs"] < repeats:
            raise Fault(path, arm["name"], f"{arm['good_runs']} runs of {repeats} that ended well", "all")
        needed = FIGURES[:2] if arm is arms[0] else FIGURES
        if any(arm["validation_loss"][figure] is None for figure in needed):
            raise Fault(path, arm["name"], "no validation loss", advice="give data.tokens.validation")
    return report, arms


def percent(arm, first):
    return 100 * arm["validation_loss"]["difference"] / first["validation_loss"]["mean"]


def deviations(arm, first):
    """The difference by the first arm's deviation; where seeds change nothing, any difference is endless."""
    difference, deviation = arm["validation_loss"]["difference"], first["validation_loss"]["deviation"]
    if deviation:
        return difference / deviation
    return float("inf") if difference else 0.0


def within_bound(arm, first):
    return abs(percent(arm, first)) < LARGEST_PERCENT and abs(deviations(arm, first)) < LARGEST_DEVIATIONS


def read_bands(path):
    bands = tomllib.loads(path.read_text(encoding="utf-8"))
    for name, band in bands.items():
        if not (isinstance(band, list) and len(band) == 2 and all(isinstance(end, (int, float)) for end in band)):
            raise Fault(path, name, str(band), "[from, to] in percent")
    return bands


def band_of(arm, bands):
    found = [band for pattern, band in bands.items() if fnmatch.fnmatchcase(arm["name"], pattern)]
    return found[-1] if found else None


def outside(arms, bands):
    """A line for each arm that is not within its band."""
    lines = []
    for arm in arms[1:]:
        band, found = band_of(arm, bands), percent(arm, arms[0])
        if band is None:
            lines.append(f"`{cell(arm['name'])}` has no band")
        elif not band[0] <= found <= band[1]:
            lines.append(f"`{cell(arm['name'])}` is {found:+.3f}% off, outside {band[0]:+g}% to {band[1]:+g}%")
    return lines


def best_rates(arms):
    """Of each optimizer the learning rate of its arm with the lowest loss, and notes on those at an end of the tried rates."""
    tried = {}
    for arm in arms:
        values = dict(part.strip().split("=", 1) for part in arm["name"].split(",") if "=" in part)
        rate = values.get("optimizer.learning_rate")
        if rate is None or not re.fullmatch(r"[0-9.e+-]+", rate):
            raise Fault("arm", arm["name"], "no optimizer.learning_rate", "one for each arm")
        loss = arm["validation_loss"]["mean"] if arm["good_runs"] else None
        tried.setdefault(values.get("optimizer.id", "adamw"), {})[rate] = math.inf if loss is None else loss
    best, notes = {}, []
    for optimizer, losses in tried.items():
        best[optimizer] = rate = min(losses, key=losses.get)
        if losses[rate] == math.inf:
            raise Fault("arms", optimizer, "no run that ended well", advice="try lower rates")
        for end, name in ((min, "lowest"), (max, "highest")):
            if len(losses) > 1 and rate == end(losses, key=float):
                notes.append(f"{optimizer}: {rate} is the {name} rate that was tried")
    return best, notes


def cell(text):
    """What ends a cell or a line of code in Markdown is escaped or left out."""
    return printable(text).replace("|", "\\|").replace("`", "'")


def table(report, arms, verdicts):
    first = arms[0]
    rows = [COLUMNS, ["---"] + ["---:"] * (len(COLUMNS) - 1)]
    for arm in arms:
        loss = arm["validation_loss"]
        name = cell(arm["name"])
        row = [f"`{name}`", str(arm["good_runs"]), f"{loss['mean']:.4f} ± {loss['deviation']:.4f}"]
        if arm is first:
            row += ["-", "-", "-"]
        else:
            row.append(f"{loss['difference']:+.5f} ± {loss['difference_deviation']:.5f}")
            row += [f"{percent(arm, first):+.3f}%", f"{deviations(arm, first):+.2f}"]
        rows.append(row)
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines += [
        "",
        f"{printable(report['config'])}, quern {printable(report.get('quern', '-'))}. Validation loss after the last "
        f"step, in nats per token: mean over {report['repeats']} seeds ± sample deviation. Difference: from the first "
        "arm's run with the same seed, mean ± deviation; in percent of the first arm's mean; by the first arm's deviation over seeds, "
        f"{first['validation_loss']['deviation']:.5f}.",
        "",
        *verdicts,
    ]
    return "\n".join(lines) + "\n"


@script
def main(arguments):
    parser = parser_for(None, __doc__)
    parser.add_argument("comparison", type=path_argument, metavar="DIR", help="what `quern ab` wrote: its --out")
    parser.add_argument("--bands", type=path_argument, metavar="FILE", help="bands of arms, TOML")
    parser.add_argument("--best", type=path_argument, metavar="FILE", help="write the best learning rates")
    options = parser.parse_args(arguments)
    if options.best:
        rates, notes = best_rates(read_report(options.comparison, ARM)["arms"])
        text = "".join(f"{optimizer} {rate}\n" for optimizer, rate in rates.items())
        write_file(options.best, text.encode())
        print(text + "".join(f"{note}\n" for note in notes), end="")
        return 0
    out = options.comparison / "convergence.md"
    report, arms = read_arms(options.comparison)
    if options.bands:
        faults = outside(arms, read_bands(options.bands))
        verdicts = [*(f"- {fault}" for fault in faults)] or ["Each arm is within its band."]
        failed = bool(faults)
    else:
        failed = not within_bound(arms[1], arms[0])
        verdicts = [
            f"`{cell(arms[1]['name'])}` is {'NOT ' if failed else ''}within {LARGEST_PERCENT}% and "
            f"{LARGEST_DEVIATIONS:g} seed deviations of `{cell(arms[0]['name'])}`."
        ]
    text = table(report, arms, verdicts)
    write_file(out, text.encode())
    print(f"{text}\n{out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
