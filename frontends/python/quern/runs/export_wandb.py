"""Writes training runs as Weights & Biases runs, from their logs: finished ones, or one that trains.

    quern-tools export-wandb runs/demo --project quern
    quern-tools export-wandb runs/demo --follow --mode online      # while it trains, until it ends
    wandb sync wandb/offline-run-*

Needs the Python package wandb. A run is its folder (with a log.jsonl) or the log itself. From Python:
`quern.Run(config, on_event=quern.WandbLog(project="quern"))`.
"""

import math
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from quern.base.arguments import path_argument
from quern.base.fault import CONFIG, RESOURCES, Fault, importing, printable, reason_of, writing
from quern.base.json_shape import parse_toml
from quern.runs.run_log import Record, Run, followed, read_run

NOT_METRICS = ("event", "step", "steps")
GROUPS = {"step": "train", "eval": "eval"}


def metrics(record: Record, group: str) -> dict[str, float]:
    """{"train/loss": 4.5, ...}; a number that is not finite is null in the log and has its name beside it."""
    result = {}
    for key, value in record.items():
        if value is None:
            value = float(record.get(f"{key}_text", "nan"))
        if key not in NOT_METRICS and not isinstance(value, str):
            result[f"{group}/{key}"] = value
    return result


class WandbLog:
    """A log sink for quern.Run(config, on_event=...): each of the run's events goes to a Weights & Biases run at once.

    WandbLog(project="quern", mode="offline")    the words of wandb.init
    """

    def __init__(self, **words: Any) -> None:
        with importing("wandb"):
            import wandb

        self._wandb, self._words = wandb, words
        self._run: Any = None

    def __call__(self, event: Record) -> None:
        kind = event["event"]
        if kind == "run" and self._run is None:
            words = {"name": event.get("name"), "config": parse_toml(event.get("config", "")), **self._words}
            self._run = self._wandb.init(**words)
        elif kind in GROUPS and self._run is not None:
            self._run.log(metrics(event, GROUPS[kind]), step=event["step"])
        elif kind == "end" and self._run is not None:
            for key, value in metrics(event, "end").items():
                if math.isfinite(value):
                    self._run.summary[key] = value
            self.close()

    def close(self) -> None:
        """Of a run that ends without its last event."""
        if self._run is not None:
            self._run.finish()
        self._run = None


def export(events: Iterable[Record], where: Path, words: dict[str, Any]) -> Counter[str]:
    """How many there were of each event."""
    sink, counts = WandbLog(**words), Counter[str]()
    try:
        try:
            for event in events:
                sink(event)
                counts[event["event"]] += 1
        finally:
            sink.close()
    except Fault:
        raise
    except Exception as error:  # of many kinds, from a name that it does not take to a full disk
        raise Fault(words["dir"], f"wandb cannot write the run {where}", f"{type(error).__name__}: {reason_of(error)}",
                    advice="free space there, or choose another --dir or --project", code=RESOURCES) from None
    return counts


def finished(run: Run) -> Iterator[Record]:
    """Each step once, as the run made it last."""
    run.config()  # a fault of it names the log
    yield {"event": "run", **run.head, "name": run.name}
    yield from sorted([*run.steps.values(), *run.evals.values()], key=lambda record: int(record["step"]))
    if run.end:
        yield run.end


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=path_argument, metavar="RUN", help="a run's folder, or its log.jsonl")
    parser.add_argument("--project", default="quern", help="project that the runs belong to (default: quern)")
    parser.add_argument("--mode", choices=("offline", "online"), default="offline", help="as of wandb (default: offline)")
    parser.add_argument("--follow", action="store_true", help="go on with what the run logs, until it ends")
    parser.add_argument(
        "--dir", type=path_argument, default=Path("."), help="where the folder wandb/ goes (default: here)"
    )


def main(options: Namespace) -> None:
    if options.follow and len(options.runs) > 1:
        raise Fault("--follow", "follows one run", f"{len(options.runs)} runs", "1", code=CONFIG)
    runs = [] if options.follow else [read_run(path) for path in options.runs]
    with importing("wandb"):
        import wandb  # noqa: F401
    with writing(options.dir):
        options.dir.mkdir(parents=True, exist_ok=True)
    words = {"project": options.project, "dir": str(options.dir), "mode": options.mode}
    for path, events in [(path, followed(path)) for path in options.runs] if options.follow else [
            (run.log, finished(run)) for run in runs]:
        counts = export(events, path, words)
        print(f"{printable(path)}: {counts['step']} steps, {counts['eval']} evaluations")
