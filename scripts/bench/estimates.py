#!/usr/bin/env python3
"""Compares `quern plan` with measured steps: raw files of `quern bench --json`, and those of a list, steps.json.

    scripts/bench/estimates.py           # renews the table of docs/performance/estimates.md
    scripts/bench/estimates.py --check   # writes nothing; exit code 1 when an estimate is off by more than 15%

Plans need no GPU, but a build with the CUDA device: that of QUERN, or of build/release.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import tables
from quern.base.arguments import parser_for
from quern.base.end_of_main import script
from quern.base.fault import Fault, reading
from quern.base.figures import three_digits
from quern.base.files import write_file
from quern.base.json_shape import NUMBER, TEXT, checked, parse

PAGE = tables.ROOT / "docs" / "performance" / "estimates.md"
TABLE = re.compile(r"(?<=<!-- estimates -->\n).*?(?=<!-- end estimates -->)", re.DOTALL)
STEPS = {"steps": [{"device": TEXT, "commit": TEXT, "tokens_per_second": NUMBER, "run": [TEXT]}]}
COLUMNS = ("device", "commit", "`quern bench`", "measured", "planned", "off by")
BOUND = 0.15  # of what is measured
OF_A_BENCH = ("--steps", "--json", "--commit")  # which a plan does not take, each with a value
SPEED = re.compile(r"a step, ([\d.]+)([kM]?) tok/s with the update")


def run_of(command):
    """The words of a bench that its plan takes too."""
    words, kept = iter(command[2:]), []
    for word in words:
        if word in OF_A_BENCH:
            next(words, None)
        elif word != "device.cuda.matmul_search=listed":
            kept.append(word)
        else:
            kept.pop()  # its --set
    return kept


def measured(folder):
    """(device, commit, run, tokens per second) of each step."""
    for path in sorted((folder / "data").glob("*.json")):
        result = tables.read_result(path)
        yield result["device"], result["commit"], run_of(result["command"]), tables.median(result)
    path = folder / "steps.json"
    with reading(path):
        content = checked(parse(path.read_bytes(), path), STEPS, path)
    for step in content["steps"]:
        yield step["device"], step["commit"], step["run"], step["tokens_per_second"]


def planned(quern, device, run):
    """Tokens per second."""
    command = [quern, "plan", *run, "--set", "device.id=cuda", "--gpu", device]
    answer = subprocess.run(command, cwd=tables.ROOT, capture_output=True, text=True, check=False)
    found = SPEED.search(answer.stdout)
    if not found:
        raise Fault(shlex.join(command), "gives no speed", (answer.stderr or answer.stdout).strip()[-500:])
    return float(found[1]) * {"": 1, "k": 1e3, "M": 1e6}[found[2]]


def rows(quern, folder):
    """Of the table, and whether all estimates are within the bound."""
    lines, holds = [], True
    for device, commit, run, speed in measured(folder):
        estimate = planned(quern, device, run)
        error = estimate / speed - 1
        holds = holds and abs(error) <= BOUND
        lines.append((device.removeprefix("NVIDIA "), f"`{commit}`", f"`{tables.cell(shlex.join(run))}`",
                      three_digits(speed), three_digits(estimate), f"{round(100 * error):+d}%"))
    return lines, holds


@script
def main(arguments):
    parser = parser_for(None, __doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; say whether an estimate is off")
    options = parser.parse_args(arguments)
    quern = os.environ.get("QUERN", str(tables.ROOT / "build" / "release" / "bin" / "quern"))
    lines, holds = rows(quern, PAGE.parent)
    if not holds:
        print(f"an estimate is off by more than {100 * BOUND:.0f}%:\n{tables.table(COLUMNS, lines)}")
    if not options.check:
        with reading(PAGE):
            text = PAGE.read_text(encoding="utf-8")
        write_file(PAGE, TABLE.sub(lambda _: tables.table(COLUMNS, lines), text).encode())
        print(PAGE)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
