#!/usr/bin/env python3
"""Writes training runs as offline Weights & Biases runs, from their logs; `wandb sync` then uploads them.

    scripts/export_wandb.py runs/demo --project quern
    wandb sync wandb/offline-run-*

Needs the Python package wandb. A run is its folder (with a log.jsonl) or the log itself.
"""

import argparse
import math
import sys
import tomllib
from pathlib import Path

import plot

NOT_METRICS = ("event", "step", "steps")


def metrics(record, group):
    """{"train/loss": 4.5, ...}; a number that is not finite is null in the log and has its name beside it."""
    result = {}
    for key, value in record.items():
        if value is None:
            value = float(record.get(f"{key}_text", "nan"))
        if key not in NOT_METRICS and isinstance(value, (int, float)):
            result[f"{group}/{key}"] = value
    return result


def history(run):
    """[(step, metrics)] by step: a step's own numbers and those of its evaluation together."""
    steps = {}
    for records, group in ((run.steps, "train"), (run.evals, "eval")):
        for step, record in records.items():
            steps.setdefault(step, {}).update(metrics(record, group))
    return sorted(steps.items())


def export(wandb, run, project, folder):
    config = tomllib.loads(run.head.get("config", ""))
    target = wandb.init(project=project, name=run.name, config=config, dir=str(folder), mode="offline")
    for step, values in history(run):
        target.log(values, step=step)
    for key, value in metrics(run.end, "end").items():
        if math.isfinite(value):
            target.summary[key] = value
    target.finish()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, or its log.jsonl")
    parser.add_argument("--project", default="quern", help="project that the runs belong to (default: quern)")
    parser.add_argument("--dir", type=Path, default=Path("."), help="where the folder wandb/ goes (default: here)")
    options = parser.parse_args(arguments)
    try:
        runs = [plot.read_run(path) for path in options.runs]
        import wandb
    except ImportError:
        print("export_wandb.py: wandb is not installed here; install it with: pip install wandb", file=sys.stderr)
        return 3
    except (plot.LogError, OSError) as error:
        print(f"export_wandb.py: {error}", file=sys.stderr)
        return 3
    options.dir.mkdir(parents=True, exist_ok=True)
    for run in runs:
        export(wandb, run, options.project, options.dir)
        print(f"{run.name}: {len(run.steps)} steps, {len(run.evals)} evaluations")
    return 0


if __name__ == "__main__":
    sys.exit(main())
