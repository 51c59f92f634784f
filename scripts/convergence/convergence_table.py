#!/usr/bin/env python3
"""Final validation losses of a `quern ab` comparison: differences from its first arm, in percent and seed deviations.

    scripts/convergence/convergence_table.py runs/convergence        # writes runs/convergence/convergence.md

The second arm is held to the project's bound: a mean paired difference under 0.5% and under twice the first arm's
deviation over seeds, in size. Exit code 1 says that it is not.
"""

import sys
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


def cell(text):
    """What ends a cell or a line of code in Markdown is escaped or left out."""
    return printable(text).replace("|", "\\|").replace("`", "'")


def table(report, arms):
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
        f"`{cell(arms[1]['name'])}` is {'' if within_bound(arms[1], first) else 'NOT '}within {LARGEST_PERCENT}% and "
        f"{LARGEST_DEVIATIONS:g} seed deviations of `{cell(first['name'])}`.",
    ]
    return "\n".join(lines) + "\n"


@script
def main(arguments):
    parser = parser_for(None, __doc__)
    parser.add_argument("comparison", type=path_argument, metavar="DIR", help="what `quern ab` wrote: its --out")
    options = parser.parse_args(arguments)
    out = options.comparison / "convergence.md"
    report, arms = read_arms(options.comparison)
    text = table(report, arms)
    write_file(out, text.encode())
    print(f"{text}\n{out}")
    return 0 if within_bound(arms[1], arms[0]) else 1


if __name__ == "__main__":
    sys.exit(main())
