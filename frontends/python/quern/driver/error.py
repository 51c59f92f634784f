"""quern.Error: what went wrong, in parts."""

import re
from dataclasses import dataclass
from typing import Any

from quern.base.fault import Fault

KINDS = {1: "internal", 2: "config", 3: "input", 4: "resources", 5: "numerics", 6: "communication"}
PLACE = r"(?:(?P<file>.+?):(?P<line>\d+):(?P<column>\d+)|--set [^:]+|a dict|(?P<whole>[^:]+))"
TEXT = r"(?:\([^()]*\)|(?!; ).)*"  # up to the next step; in parentheses anything stands
# As the messages of the core are made: "run.toml:3:1: train.steps: wrong type, found X, expected Y; next step".
FINDING = re.compile(
    PLACE + r": (?P<key>[^:\s]+): (?P<what>.*?)(?:(?:, )?found (?P<found>.*?))?(?:, expected (?P<expected>" + TEXT + r"))?"
    r"(?:; (?P<next>.*))?")
WHERE = re.compile(PLACE + r"(?:: (?P<key>[\w.\"-]+)(?: \(default\))?)?(?:: .*)?")


@dataclass(frozen=True)
class Finding:
    """One fault of a config. Texts that the message does not have are empty, numbers None."""

    file: str  #: the config's; empty: the value was set by Config.set or a dict
    line: int | None  #: from 1; None: of the whole file, such as a key that it lacks
    column: int | None  #: from 1
    key: str  #: "train.steps"
    what: str
    found: str
    expected: str
    next_step: str


class Error(Exception):
    """A fault of quern, with the message that the program prints: str(error).

    kind         "config", "input", "resources", "numerics", "communication" or "internal"
    code         the program's exit code for that kind
    where        file:line:column, a path, a key or a value of the program
    file, line, column, key    the same in parts, where it is a place in a config
    what, found, expected, next_step    what is wrong, the value, the valid values, and what to do
    findings     all faults of a config that was checked, as Finding; else empty

    Parts that a message does not have are empty, and line and column None. A value that Python refuses is also a
    ValueError, a TypeError, or, of a tensor that is not there, a KeyError.
    """

    def __init__(self, message: str, detail: dict[str, Any]) -> None:
        super().__init__(message)
        self._detail = detail
        self.code: int = detail["code"]
        self.kind = KINDS.get(self.code, "internal")
        self.where: str = detail["where"]
        self.findings = () if self.where or self.kind != "config" else findings_of(detail["what"])
        place = WHERE.fullmatch(self.where)
        first = self.findings[0] if self.findings else Finding(
            file_of(place) if place and (place["file"] or self.where.endswith(".toml")) else "", int(place["line"]) if place and place["line"] else None,
            int(place["column"]) if place and place["line"] else None, (place and place["key"]) or "",
            detail["what"], detail["found"], detail["expected"], detail["next"])
        self.file, self.line, self.column, self.key = first.file, first.line, first.column, first.key
        self.what, self.found, self.expected, self.next_step = first.what, first.found, first.expected, first.next_step

    def __str__(self) -> str:  # also where it is a KeyError, which would show it with quotes
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:  # for other processes
        return type(self), (self.args[0], self._detail)


class WrongValue(Error, ValueError):
    pass


class WrongType(Error, TypeError):
    pass


class UnknownKey(Error, KeyError):
    pass


def refused(kind: type[Error], where: str, what: str, found: str = "", expected: str = "", next_step: str = "") -> Error:
    """An Error of a value that the program gave, with the message that the core makes of these parts."""
    message = f"{where}: {what}" + (f": found {found}" if found else "") + (f", expected {expected}" if expected else "")
    return kind(message + (f"; {next_step}" if next_step else ""), {
        "code": 2, "where": where, "what": what, "found": found, "expected": expected, "next": next_step})


def error_of(fault: Fault) -> Error:
    """A fault of the tools' code."""
    message = str(fault)
    return Error(message, {"code": fault.code, "where": "the tools", "what": message, "found": "", "expected": "", "next": ""})


def fault_of(error: Error) -> Fault:
    """For the tools' code."""
    fault = Fault("", "", code=error.code)
    fault.args = (str(error),)
    return fault


def file_of(place: re.Match[str]) -> str:
    return place["file"] or place["whole"] or ""


def findings_of(text: str) -> tuple[Finding, ...]:
    """Of a message with a fault a line."""
    matches = (FINDING.fullmatch(line) for line in text.splitlines())
    return tuple(
        Finding(file_of(match), int(match["line"]) if match["line"] else None,
                int(match["column"]) if match["line"] else None, match["key"], match["what"] or "",
                match["found"] or "", match["expected"] or "", match["next"] or "")
        for match in matches if match)
