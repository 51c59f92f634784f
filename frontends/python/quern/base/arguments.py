"""Words of the command line: a parser whose faults are Faults, and kinds of values that say what they expect."""

import argparse
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from quern.base.fault import CONFIG, Fault


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Fault(self.prog, message, advice="see --help", code=CONFIG)


def parser_for(program: str | None, description: str | None) -> Parser:
    """program: None for the name of the script that runs."""
    return Parser(
        prog=program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )


def expanded(text: str) -> Path:
    """A path, its "~" the home directory: a shell leaves "~" in "--option=~/a" as it is."""
    return Path(os.path.expanduser(text))


def path_argument(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("found an empty path, expected a name")
    return expanded(text)


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """The kind of an integer within bounds, for add_argument(type=...)."""

    def read(text: str) -> int:
        if re.fullmatch("-?[0-9]{1,18}", text) and least <= int(text) and (most is None or int(text) <= most):
            return int(text)
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise argparse.ArgumentTypeError(f"found '{text}', expected an integer {bounds}")

    return read


def number(text: str) -> float:
    """A finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"found '{text}', expected a finite number")
    return value


def share(text: str) -> float:
    """A number from 0 to below 1."""
    value = number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"found '{text}', expected a number from 0 to below 1")
    return value
