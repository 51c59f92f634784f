#!/usr/bin/env python3
"""Final validation losses of a `quern ab` comparison: differences from its first arm, in percent and seed deviations.

    scripts/convergence_table.py runs/convergence        # writes runs/convergence/convergence.md

The second arm is held to the project's bound: a mean paired difference under 0.5% and under twice the first arm's
deviation over seeds, in size. Exit code 1 says that it is not.
"""

import argparse
import json
import sys
from pathlib import Path

LARGEST_PERCENT, LARGEST_DEVIATIONS = 0.5, 2.0
COLUMNS = ("arm", "runs", "validation loss", "difference", "percent", "in seed deviations")


class ReportError(Exception):
    """A comparison without the figures that the table needs."""


def read_arms(folder):
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    arms = report["arms"]
    for arm in arms:
        if arm["good_runs"] < report["repeats"]:
            raise ReportError(f"{arm['name']}: {arm['good_runs']} runs of {report['repeats']} ended well")
        if arm["validation_loss"]["mean"] is None:
            raise ReportError(f"{arm['name']}: no validation loss; give data.tokens.validation")
    if report["repeats"] < 2:
        raise ReportError("one run of each arm, so no deviation over seeds; compare with --repeat 3")
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


def table(report, arms):
    first = arms[0]
    rows = [COLUMNS, ["---"] + ["---:"] * (len(COLUMNS) - 1)]
    for arm in arms:
        loss = arm["validation_loss"]
        name = arm["name"].replace("|", "\\|")
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
        f"{report['config']}, quern {report['quern']}. Validation loss after the last step, in nats per token: mean "
        f"over {report['repeats']} seeds ± sample deviation. Difference: from the first arm's run with the same seed, "
        "mean ± deviation; in percent of the first arm's mean; by the first arm's deviation over seeds, "
        f"{first['validation_loss']['deviation']:.5f}.",
        "",
        f"`{arms[1]['name']}` is {'' if within_bound(arms[1], first) else 'NOT '}within {LARGEST_PERCENT}% and "
        f"{LARGEST_DEVIATIONS:g} seed deviations of `{first['name']}`.",
    ]
    return "\n".join(lines) + "\n"


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", type=Path, metavar="DIR", help="what `quern ab` wrote: its --out")
    options = parser.parse_args(arguments)
    out = options.comparison / "convergence.md"
    try:
        report, arms = read_arms(options.comparison)
        text = table(report, arms)
        within = within_bound(arms[1], arms[0])
        partial = out.with_name(f".partial-{out.name}")
        partial.write_text(text, encoding="utf-8")
        partial.replace(out)
    except (ReportError, OSError) as error:
        print(f"convergence_table.py: {error}", file=sys.stderr)
        return 3
    except (ValueError, KeyError, TypeError, IndexError) as error:
        name = options.comparison / "report.json"
        print(f"convergence_table.py: {name}: not a report of quern ab: {error!r}", file=sys.stderr)
        return 3
    print(f"{text}\n{out}")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
