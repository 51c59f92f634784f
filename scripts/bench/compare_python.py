#!/usr/bin/env python3
"""Speed and losses of a run driven from Python beside `quern train`, in turn, by the times in their logs.

    scripts/bench/compare_python.py configs/qwen2.5/0.5b.toml [--repeat 3] [--steps 10] [--set a.b=v]...

Speed is tokens a second between the ends of step 3 and of the last step. Exit code 1 when the fastest run from Python has
less than 99.5% of the fastest of `quern train`, or losses differ. Needs numpy, and an installed wheel or QUERN_PREFIX.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "frontends" / "python"))  # an installed one comes first
from quern.base.arguments import parser_for
from quern.base.end_of_main import script
from quern.base.installation import find_quern
from quern.runs.run_log import read_run

LEAST = 0.995
FIRST = 3  # earlier steps choose kernels and record graphs
LOOP = """\
import sys, quern
with quern.Run(quern.Config(sys.argv[1], None, tuple(sys.argv[2:]))) as run:
    for step in run:
        pass
"""


def run_once(words, log):
    """Tokens a second, and the losses of all steps."""
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    steps = [record for _, record in sorted(read_run(log).steps.items())]
    first, last = steps[FIRST - 1], steps[-1]
    return (last["tokens"] - first["tokens"]) / (last["time"] - first["time"]), [step["loss"] for step in steps]


@script
def main(arguments=None):
    parser = parser_for(None, __doc__)
    parser.add_argument("config", help="a quern config")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each kind (default 3)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a run (default 10)")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=v", help="override a key of it")
    options = parser.parse_args(arguments)
    speeds, losses = {"train": [], "python": []}, []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.repeat):
            for kind, found in speeds.items():
                log = Path(folder) / f"{kind}-{number}"
                settings = [*options.set, f"train.steps={options.steps}", "log.every=1", 'log.sinks=["jsonl"]',
                            f"log.directory={log}", "checkpoint.every=0", "checkpoint.at_end=false", "checkpoint.export=false"]
                words = [find_quern(None), "train", options.config, *(word for key in settings for word in ("--set", key))]
                if kind == "python":
                    words = [sys.executable, "-c", LOOP, options.config, *settings]
                speed, run = run_once(words, log)
                found.append(speed)
                losses.append(run)
                print(f"{kind:>7} {speed:10.1f} tok/s, last loss {run[-1]:.6f}", flush=True)
    ratio = max(speeds["python"]) / max(speeds["train"])
    equal = all(run == losses[0] for run in losses)
    print(f"ratio {ratio:.4f}, losses {'equal' if equal else 'DIFFER'}")
    return 0 if equal and ratio >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
