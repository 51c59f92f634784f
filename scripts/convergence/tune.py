#!/usr/bin/env python3
"""Finds the learning rate of each optimizer with the lowest validation loss, by `quern ab`.

    scripts/convergence/tune.py --optimizer "ID SETTINGS RATE RATE..." [more optimizers] --best FILE --out DIR -- quern ab FILE ...

SETTINGS are an optimizer's overrides, a comma behind each; "-" for none. While the best rate is the lowest or the highest
that was tried, two more beyond it are tried, each half or twice the last, --further times at most. FILE gets a line for each optimizer:
its id and its rate, and "lowest" or "highest" where the rate is still at that end.

A rate at which a run's loss is not finite is passed over and named. Any other failure ends the search, with its exit code.
--jobs N tunes so many optimizers at a time, on as many GPUs as there are.
"""

import concurrent.futures
import math
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "frontends" / "python"))
from quern.base.arguments import parser_for, path_argument
from quern.base.end_of_main import script
from quern.base.fault import Fault, printable
from quern.base.files import write_file
from quern.base.json_shape import COUNT, INTEGER, NUMBER, TEXT
from quern.runs.ab_report import read_report

ARM = {"name": TEXT, "validation_loss": {"mean": NUMBER}, "runs": [{"exit_code": INTEGER, "message": TEXT}]}
DIVERGED = 5  # exit code of a run whose loss or gradient is not finite


class Failed(Exception):
    def __init__(self, code, text):
        super().__init__(text)
        self.code = code


def losses_at(optimizer, settings, rates, out, command, environment):
    """Validation loss by rate; infinite where the run diverged."""
    arms = [word for rate in rates for word in ("--arm", f"{settings}optimizer.learning_rate={rate}")]
    done = subprocess.run([*command, *arms, "--out", str(out)], env=environment, capture_output=True, text=True)
    if done.returncode not in (0, DIVERGED):
        raise Failed(done.returncode, f"{optimizer}: {' '.join(command[:2])} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    losses = {}
    for rate, arm in zip(rates, read_report(out, ARM)["arms"], strict=True):
        for run in arm["runs"]:
            if run["exit_code"] not in (0, DIVERGED):
                raise Failed(run["exit_code"], f"{arm['name']}: exit code {run['exit_code']}: {run['message']}")
        good = all(run["exit_code"] == 0 for run in arm["runs"])
        if good and arm["validation_loss"]["mean"] is None:
            raise Fault(out / "report.json", arm["name"], "no validation loss", advice="give data.tokens.validation")
        losses[rate] = arm["validation_loss"]["mean"] if good else math.inf
    return losses


def end_of(losses, rate):
    """At which end of the rates that were tried this one is, or none."""
    for end, name in ((min, "lowest"), (max, "highest")):
        if rate == end(losses, key=float):
            return name
    return ""


def tune(optimizer, settings, rates, out, further, command, environment):
    losses = {}
    for attempt in range(further + 1):
        losses |= losses_at(optimizer, settings, rates, out / f"{optimizer}-{attempt}", command, environment)
        best = min(losses, key=losses.get)
        if losses[best] == math.inf:
            best = min(losses, key=float)  # lower ones may not diverge
        end = end_of(losses, best)
        if not end:
            break
        factor = 2 if end == "highest" else 0.5
        rates = [f"{float(best) * factor:g}", f"{float(best) * factor**2:g}"]
    if losses[best] == math.inf:
        raise Failed(DIVERGED, f"{optimizer}: no run ended well, at rates {', '.join(losses)}")
    return best, end, losses


def line_of(optimizer, losses):
    tried = sorted(losses.items(), key=lambda item: float(item[0]))
    return f"{optimizer}: " + ", ".join(f"{rate} {'diverged' if loss == math.inf else f'{loss:.4f}'}" for rate, loss in tried)


def gpus():
    try:
        return len(subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True).stdout.splitlines())
    except FileNotFoundError:
        return 0


@script
def main(arguments):
    parser = parser_for(None, __doc__)
    parser.add_argument("--optimizer", action="append", required=True, metavar="TEXT", help="its id, settings and rates")
    parser.add_argument("--best", type=path_argument, required=True, metavar="FILE", help="where the best rates go")
    parser.add_argument("--out", type=path_argument, required=True, metavar="DIR", help="where the runs go")
    parser.add_argument("--further", type=int, default=2, metavar="N", help="how often to go beyond the rates (default: 2)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="optimizers at a time (default: 1)")
    parser.add_argument("command", nargs="+", metavar="WORD", help="quern ab FILE, and settings")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    there = gpus()

    def tuned(number):
        optimizer, settings, *rates = options.optimizer[number].split()
        environment = dict(os.environ)
        if options.jobs > 1:  # each with a cache of timed matmuls of its own
            cache = options.out / f"{optimizer}.cache"
            cache.mkdir(exist_ok=True)
            environment |= {"XDG_CACHE_HOME": str(cache.resolve()), "CUDA_VISIBLE_DEVICES": str(number % there if there else 0)}
        return tune(optimizer, "" if settings == "-" else settings, rates, options.out, options.further, options.command, environment)

    text, failures = "", []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        futures = [pool.submit(tuned, number) for number in range(len(options.optimizer))]
    for words, future in zip(options.optimizer, futures, strict=True):
        optimizer = words.split()[0]
        try:
            best, end, losses = future.result()
        except Failed as failure:
            failures.append(failure)
            continue
        print(line_of(optimizer, losses))
        text += " ".join(word for word in (optimizer, best, end) if word) + "\n"
    if failures:
        print("".join(f"{printable(line)}\n" for failure in failures for line in str(failure).splitlines()), file=sys.stderr, end="")
        return failures[0].code
    write_file(options.best, text.encode())
    print(f"\n{options.best}:\n{text}", end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
