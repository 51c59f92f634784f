"""Reads log.jsonl, what a run leaves about itself. Every field has the type that quern writes, or the line is refused.

What quern writes: core/src/run/trainer.cpp. Fields that this file does not know are numbers or texts. A log still
being written is fine.
"""

import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quern.base.fault import Fault, reading
from quern.base.files import is_locked
from quern.base.json_shape import COUNT, INTEGER, NUMBER, SCALAR, TEXT, Kind, Shape, checked, choice, parse, parse_toml

POLL = 0.2  # seconds between looks at a log that grows
QUIET = 60.0  # seconds without a line, and without a process that holds the run, after which it is dead
LONGEST_LINE = 16 << 20  # bytes; the longest is the first, with the whole config
LARGEST = 1e100  # larger values cannot be drawn beside anything else

TOKENS = re.compile(r"(\d{1,9}(,\d{1,9})*)?", re.ASCII)
TOKEN_LIST = Kind("token ids, such as 1,2,3", lambda value: isinstance(value, str) and bool(TOKENS.fullmatch(value)))
NOT_FINITE = ("nan", "-nan", "inf", "-inf")
FORMATS = {"e4m3": 448.0, "e5m2": 57344.0, "i8": 127.0, "i4": 7.0}  # the largest code of each

Record = dict[str, Any]  # one line of the log, as its shape below has it
EVENTS: dict[str, dict[str, Shape]] = {
    "run": {
        "name?": TEXT, "model?": TEXT, "device?": TEXT, "precision?": TEXT, "quern?": TEXT, "config?": TEXT,
        "parameters?": COUNT, "steps?": COUNT, "step?": COUNT, "tokens_per_step?": COUNT, "device_bytes?": COUNT,
    },
    "step": {
        "step": COUNT, "steps?": COUNT, "tokens?": COUNT, "loss?": NUMBER, "lr?": NUMBER, "grad_norm?": NUMBER,
        "tokens_per_second?": NUMBER, "time?": NUMBER, "eta?": NUMBER,
    },
    "eval": {"step": COUNT, "tokens?": COUNT, "loss?": NUMBER},
    "sample": {"step": COUNT, "prompt": COUNT, "prompt_tokens?": TOKEN_LIST, "tokens?": TOKEN_LIST, "finish?": TEXT},
    "scale": {
        "step": COUNT, "tensor": TEXT, "layer?": INTEGER, "format": choice(*FORMATS), "amax": NUMBER, "scale?": NUMBER,
        "clipped?": NUMBER, "underflowed?": NUMBER,
    },
    "end": {"step?": COUNT, "tokens?": COUNT, "loss?": NUMBER, "val_loss?": NUMBER, "export?": TEXT},
}


@dataclass
class Run:
    name: str
    log: Path
    steps: dict[int, Record] = field(default_factory=dict)  # step -> its record; a resumed run repeats some, the last stands
    evals: dict[int, Record] = field(default_factory=dict)
    samples: dict[tuple[int, int], Record] = field(default_factory=dict)  # (step, number of the prompt) -> its record
    head: Record = field(default_factory=dict)  # the last run record: model, device, config
    end: Record = field(default_factory=dict)  # the last end record; empty while the run goes on

    def series(self, event: str, x: str, y: str) -> tuple[list[Any], list[Any]]:
        """Two lists, of the records that have both; values that are not finite are gaps."""
        records = (self.steps if event == "step" else self.evals).values()
        points = [(r[x], drawable(r[y])) for r in records if x in r and y in r]
        points.sort(key=lambda point: point[0])
        return [x for x, _ in points], [y for _, y in points]

    def config(self) -> dict[str, Any]:
        """The tables of the run's config."""
        try:
            return parse_toml(self.head.get("config", ""))
        except ValueError as error:
            raise Fault(self.log, "config of the run record", str(error), "TOML") from None


def drawable(value: float | None) -> float:
    return value if value is not None and abs(value) < LARGEST else math.nan


def log_of(path: Path) -> Path:
    return path / "log.jsonl" if path.is_dir() else path


def read_lines(log: Path) -> Iterator[tuple[int, bytes]]:
    """(number, line) without one that is still being written."""
    with reading(log), open(log, "rb") as file:
        number = 0
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                found = f"over {LONGEST_LINE} bytes"
                raise Fault(f"{log}:{number}", "too long for a log", found, "a line for each event")
            yield number, line


def read_records(log: Path) -> Iterator[tuple[str, Record]]:
    """(place, record) of each event."""
    for number, line in read_lines(log):
        if not line.strip():
            continue
        where = f"{log}:{number}"
        try:
            record = parse(line, where)
        except Fault:
            if line.endswith(b"\n"):
                raise
            return  # the run is still writing it, or was killed
        event = checked(record, {"event": TEXT}, where)["event"]
        yield where, checked(record, {**EVENTS.get(event, {}), "*": SCALAR}, where, event)


def followed(path: Path) -> Iterator[Record]:
    """The events of a run's log, also those that it is yet to write: up to the end of the run that is the last one."""
    log, event, last = log_of(path), "", time.monotonic()
    with reading(log), open(log, "rb") as file:
        while True:
            begin, line = file.tell(), file.readline(LONGEST_LINE + 1)
            if line.endswith(b"\n"):
                last = time.monotonic()
                event = checked(parse(line, log), {"event": TEXT, "*": SCALAR}, log)["event"]
                yield checked(parse(line, log), {**EVENTS.get(event, {}), "*": SCALAR}, log, event)
                continue
            if event == "end" and not line:
                return
            if len(line) > LONGEST_LINE:
                raise Fault(log, "too long for a log", f"over {LONGEST_LINE} bytes", "a line for each event")
            file.seek(begin)  # the run is still writing it
            time.sleep(POLL)
            if time.monotonic() - last > QUIET:
                if not is_running(log):
                    raise Fault(log, "its run has ended without its last event", advice="start the run again, which continues")
                last = time.monotonic()


def is_running(log: Path) -> bool:
    """Whether a process holds the log, or its run's folder, as runs do from their start on."""
    return any(file.exists() and is_locked(file) for file in (log.with_name(".lock"), log))


def read_run(path: Path) -> Run:
    log = log_of(path)
    run = Run(log.parent.name if log.name == "log.jsonl" else log.stem, log)
    for where, record in read_records(log):
        check_names_of_numbers(record, where)
        event = record["event"]
        if event == "run":
            run.name, run.head, run.end = record.get("name", run.name), record, {}
        elif event in ("step", "eval"):
            (run.steps if event == "step" else run.evals)[record["step"]] = record
        elif event == "sample":
            run.samples[record["step"], record["prompt"]] = record
        elif event == "end":
            run.end = record
    if not run.steps and not run.evals:
        raise Fault(log, "no step or eval record yet", advice="wait for the run's first step")
    return run


def check_names_of_numbers(record: Record, where: str) -> None:
    """A number that is not finite is null, and has its name beside it: {"loss": null, "loss_text": "nan"}."""
    for key, value in record.items():
        if value is None and f"{key}_text" in record:
            checked(record[f"{key}_text"], choice(*NOT_FINITE), where, f"{record['event']}.{key}_text")


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Runs with distinct names: the runs of a comparison are all called seed-1 and so on."""
    runs = [read_run(path) for path in paths]
    for whole_path in (False, True):
        names = [run.name for run in runs]
        for run, path in zip(runs, paths):
            folder = path if path.is_dir() else path.parent
            if names.count(run.name) > 1:
                run.name = str(folder) if whole_path else f"{folder.resolve().parent.name}/{run.name}"
    return runs
