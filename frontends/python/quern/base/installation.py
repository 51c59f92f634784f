"""The quern that this package belongs to: a wheel's, an installation's or a checkout's."""

import os
import shutil
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def prefixes() -> list[Path]:
    """Where it may be: $QUERN_PREFIX alone if that is set; else the wheel's folder `tree`, the prefix of the installation,
    and the checkout's release build."""
    if prefix := os.environ.get("QUERN_PREFIX"):
        return [Path(prefix)]
    found = [PACKAGE / "tree"]
    for folder in PACKAGE.parents:
        for marker, place in (("lib/quern/python", "."), ("frontends/python", "build/release")):
            if (folder / marker).is_dir():
                found.append(folder / place)
    return found


def installed_file(name: str) -> Path | None:
    """The file `name`, such as "bin/quern". None: it is not there."""
    return next((prefix / name for prefix in prefixes() if (prefix / name).is_file()), None)


def prefix() -> Path:
    """The folder that has quern's bin, lib, include and share: for CMAKE_PREFIX_PATH, examples and configs."""
    program = installed_file("bin/quern")
    if program is None:
        raise FileNotFoundError("quern's program is not beside its Python package; QUERN_PREFIX names another prefix")
    return program.parents[1]


def find_quern(given: str | None) -> str:
    """The program: --quern, or from this package's prefix or checkout, or from the path."""
    if given:
        return given
    return str(installed_file("bin/quern") or shutil.which("quern") or "quern")
