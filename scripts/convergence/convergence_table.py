#!/usr/bin/env python3
"""Final validation losses of a `quern ab` comparison: differences from its first arm, in percent and seed deviations.

    scripts/convergence/convergence_table.py runs/convergence        # writes runs/convergence/convergence.md

The second arm is held to the project's bound: a mean paired difference under 0.5% and under twice the first arm's
deviation over seeds, in size. With --bands FILE each arm is held to its own band instead: the difference in percent, from
and to, of the last line whose pattern the arm's name matches. Exit code 1 says that an arm is outside, or has no band.

Where runs were evaluated on their way, the table has the steps after which the validation loss is first as low as the first
arm's at two thirds of its steps, between evaluations by a straight line: mean and deviation over the seeds.

--rates FILE, what tune.py wrote: rates that are the lowest or the highest that was tried are named below the table.
"""

import fnmatch
import statistics
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
from quern.runs.run_log import read_run

FIGURES = ("mean", "deviation", "difference", "difference_deviation")
ARM = {
    "name": TEXT, "good_runs": COUNT, "validation_loss": dict.fromkeys(FIGURES, NUMBER), "runs?": [{"directory": TEXT}],
}
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


def curves(arm):
    """Steps and validation losses of each run; empty where a log is gone, or has no more than the last evaluation."""
    folders = [Path(run["directory"]) for run in arm.get("runs", ())]
    if not all((folder / "log.jsonl").exists() for folder in folders):
        return []
    found = [read_run(folder).series("eval", "step", "loss") for folder in folders]
    return found if all(len(steps) > 1 for steps, _ in found) else []


def steps_to(loss, steps, losses):
    """The steps after which the curve is first as low as `loss`; None if never."""
    for i, value in enumerate(losses):
        if value <= loss:
            if i == 0:
                return float(steps[0])
            share = (losses[i - 1] - loss) / (losses[i - 1] - value)
            return steps[i - 1] + share * (steps[i] - steps[i - 1])
    return None


def fixed_loss(first):
    """The mean of the first arm's runs at two thirds of its steps; None without evaluations there."""
    found = curves(first)
    if not found or any(steps != found[0][0] for steps, _ in found):
        return None
    steps = found[0][0]
    at = max((i for i, step in enumerate(steps) if 3 * step <= 2 * steps[-1]), default=0)
    return statistics.mean(losses[at] for _, losses in found)


def steps_cell(arm, loss):
    counts = [steps_to(loss, *curve) for curve in curves(arm)]
    reached = [count for count in counts if count is not None]
    if not counts or len(reached) < len(counts):
        return f"{len(reached)} runs of {len(counts)}" if reached else "not reached"
    return f"{statistics.mean(reached):.0f} ± {statistics.stdev(reached):.0f}"


def rates_at_an_end(path):
    """A line for each optimizer whose rate is the lowest or highest that was tried."""
    lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    return [f"- {words[0]}: {words[1]} is the {words[2]} rate that was tried" for words in lines if len(words) > 2]


def cell(text):
    """What ends a cell or a line of code in Markdown is escaped or left out."""
    return printable(text).replace("|", "\\|").replace("`", "'")


def table(report, arms, verdicts):
    first = arms[0]
    loss_of_steps = fixed_loss(first)
    columns = COLUMNS if loss_of_steps is None else (*COLUMNS, f"steps to {loss_of_steps:.3f}")
    rows = [columns, ["---"] + ["---:"] * (len(columns) - 1)]
    for arm in arms:
        loss = arm["validation_loss"]
        name = cell(arm["name"])
        row = [f"`{name}`", str(arm["good_runs"]), f"{loss['mean']:.4f} ± {loss['deviation']:.4f}"]
        if arm is first:
            row += ["-", "-", "-"]
        else:
            row.append(f"{loss['difference']:+.5f} ± {loss['difference_deviation']:.5f}")
            row += [f"{percent(arm, first):+.3f}%", f"{deviations(arm, first):+.2f}"]
        if loss_of_steps is not None:
            row.append(steps_cell(arm, loss_of_steps))
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
    parser.add_argument("--rates", type=path_argument, metavar="FILE", help="learning rates that tune.py found")
    options = parser.parse_args(arguments)
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
    if options.rates:
        verdicts += rates_at_an_end(options.rates)
    text = table(report, arms, verdicts)
    write_file(out, text.encode())
    print(f"{text}\n{out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
