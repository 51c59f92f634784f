"""Writes training runs as offline Weights & Biases runs, from their logs; `wandb sync` then uploads them.

    quern-tools export-wandb runs/demo --project quern
    wandb sync wandb/offline-run-*

Needs the Python package wandb. A run is its folder (with a log.jsonl) or the log itself.
"""

import math
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from quern.base.arguments import path_argument
from quern.base.fault import RESOURCES, Fault, importing, printable, reason_of, writing
from quern.runs.run_log import Record, Run, read_run

NOT_METRICS = ("event", "step", "steps")


def metrics(record: Record, group: str) -> dict[str, float]:
    """{"train/loss": 4.5, ...}; a number that is not finite is null in the log and has its name beside it."""
    result = {}
    for key, value in record.items():
        if value is None:
            value = float(record.get(f"{key}_text", "nan"))
        if key not in NOT_METRICS and not isinstance(value, str):
            result[f"{group}/{key}"] = value
    return result


def history(run: Run) -> list[tuple[int, dict[str, float]]]:
    """[(step, metrics)] by step: a step's own numbers together with its evaluation's."""
    steps: dict[int, dict[str, float]] = {}
    for records, group in ((run.steps, "train"), (run.evals, "eval")):
        for step, record in records.items():
            steps.setdefault(step, {}).update(metrics(record, group))
    return sorted(steps.items())


def export(wandb: Any, run: Run, project: str, folder: Path) -> None:
    config = run.config()
    try:
        target = wandb.init(project=project, name=run.name, config=config, dir=str(folder), mode="offline")
        for step, values in history(run):
            target.log(values, step=step)
        for key, value in metrics(run.end, "end").items():
            if math.isfinite(value):
                target.summary[key] = value
        target.finish()
    except Exception as error:  # of many kinds, from a name that it does not take to a full disk
        raise Fault(folder, f"wandb cannot write the run {run.name}", f"{type(error).__name__}: {reason_of(error)}",
                    advice="free space there, or choose another --dir or --project", code=RESOURCES) from None


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=path_argument, metavar="RUN", help="a run's folder, or its log.jsonl")
    parser.add_argument("--project", default="quern", help="project that the runs belong to (default: quern)")
    parser.add_argument(
        "--dir", type=path_argument, default=Path("."), help="where the folder wandb/ goes (default: here)"
    )


def main(options: Namespace) -> None:
    runs = [read_run(path) for path in options.runs]
    with importing("wandb"):
        import wandb
    with writing(options.dir):
        options.dir.mkdir(parents=True, exist_ok=True)
    for run in runs:
        export(wandb, run, options.project, options.dir)
        print(f"{printable(run.name)}: {len(run.steps)} steps, {len(run.evals)} evaluations")
