#!/usr/bin/env python3
"""Compares `quern plan` with measured steps: raw files of `quern bench --json`, a list of steps, steps.json, and the
steps of LLMQ that its authors published, published.json.

    scripts/bench/estimates.py           # renews the tables of docs/performance/estimates.md
    scripts/bench/estimates.py --check   # writes nothing; exit code 1 when an estimate is wrong

An estimate is wrong when it is off by more than 15% of the measurement; or when it is below what LLMQ reaches in a
step of the same tokens, or more than twice that. Plans need no GPU, but a build with the CUDA device: QUERN's, or
build/release.
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
STEP = {"device": TEXT, "tokens_per_second": NUMBER, "run": [TEXT]}
COLUMNS = ("device", "commit", "`quern bench`", "measured", "planned", "off by")
PUBLISHED_COLUMNS = ("GPU", "`quern plan`", "LLMQ", "planned", "times")
BOUND = 0.15  # of the measurement
TIMES = (1, 2)  # of what LLMQ reaches
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
        if "--document-tokens" in result["command"]:  # a plan has a document a row
            continue
        yield result["device"], result["commit"], run_of(result["command"]), tables.median(result)
    for step in steps(folder / "steps.json", STEP | {"commit": TEXT}):
        yield step["device"], step["commit"], step["run"], step["tokens_per_second"]


def steps(path, shape):
    with reading(path):
        return checked(parse(path.read_bytes(), path), {"steps": [shape]}, path)["steps"]


def planned(quern, device, run):
    """Tokens per second."""
    command = [quern, "plan", *run, "--set", "device.id=cuda", "--gpu", device]
    answer = subprocess.run(command, cwd=tables.ROOT, capture_output=True, text=True, check=False)
    found = SPEED.search(answer.stdout)
    if not found:
        raise Fault(shlex.join(command), "gives no speed", (answer.stderr or answer.stdout).strip()[-500:])
    return float(found[1]) * {"": 1, "k": 1e3, "M": 1e6}[found[2]]


def short(device):
    return device.removeprefix("NVIDIA ").removeprefix("GeForce ").removesuffix(" Blackwell Workstation Edition")


def rows(quern, folder):
    """Of the table of own steps, and whether all estimates are within the bound."""
    lines, holds = [], True
    for device, commit, run, speed in measured(folder):
        estimate = planned(quern, device, run)
        error = estimate / speed - 1
        holds = holds and abs(error) <= BOUND
        lines.append((short(device), f"`{commit}`", f"`{tables.cell(shlex.join(run))}`", three_digits(speed),
                      three_digits(estimate), f"{round(100 * error):+d}%"))
    return lines, holds


def published_rows(quern, folder):
    """Of the table of LLMQ's steps, and whether all estimates are as they should be beside these."""
    lines, holds = [], True
    for step in steps(folder / "published.json", STEP):
        speed, estimate = step["tokens_per_second"], planned(quern, step["device"], step["run"])
        holds = holds and TIMES[0] <= estimate / speed <= TIMES[1]
        lines.append((short(step["device"]), f"`{tables.cell(shlex.join(step['run']))}`", three_digits(speed),
                      three_digits(estimate), f"{estimate / speed:.2f}"))
    return lines, holds


TABLES = {"estimates": (COLUMNS, rows), "published": (PUBLISHED_COLUMNS, published_rows)}


@script
def main(arguments):
    parser = parser_for(None, __doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; say whether an estimate is wrong")
    options = parser.parse_args(arguments)
    quern = os.environ.get("QUERN", str(tables.ROOT / "build" / "release" / "bin" / "quern"))
    with reading(PAGE):
        text = PAGE.read_text(encoding="utf-8")
    all_hold = True
    for name, (columns, make) in TABLES.items():
        lines, holds = make(quern, PAGE.parent)
        all_hold = all_hold and holds
        table = tables.table(columns, lines)
        if not holds:
            print(f"wrong estimates among these ({name}):\n{table}")
        block = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end {name} -->)", re.DOTALL)
        text = block.sub(lambda _, table=table: table, text)
    if not options.check:
        write_file(PAGE, text.encode())
        print(PAGE)
    return 0 if all_hold else 1


if __name__ == "__main__":
    sys.exit(main())
