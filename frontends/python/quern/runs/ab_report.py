"""Reads report.json, the figures of a `quern ab` comparison. What quern writes: frontends/ab/comparison_report.cpp."""

from pathlib import Path
from typing import Any

from quern.base.fault import Fault, reading
from quern.base.json_shape import COUNT, TEXT, Shape, checked, parse


def read_report(folder: Path, arm: Shape) -> dict[str, Any]:
    """The report, with the fields of each arm that the shape `arm` names."""
    path = folder / "report.json"
    with reading(path):
        data = path.read_bytes()
    shape: Shape = {"config": TEXT, "quern?": TEXT, "repeats": COUNT, "arms": [arm]}
    try:
        report: dict[str, Any] = checked(parse(data, path), shape, path)
    except Fault as fault:
        raise Fault(fault, "", advice="not a report of quern ab") from None
    if not report["arms"]:
        raise Fault(path, "not a report of quern ab", "no arms")
    return report
